"""Rotary angles: interleaved mrope for the language model, row and column for the vision encoder."""

import torch

from trainer.layers.attention import inverse_frequencies
from trainer.model.shape import DecoderShape, VisionShape


def mrope_angles(position_ids: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """(3, T) positions -> (T, rotary_dim / 2) float32, one angle per pair.

    Pairs alternate t, h, w, t, h, w, ... up to the end of each axis' section; the remaining pairs are t's
    (transformers 5.23, Qwen3VLTextRotaryEmbedding.recomposition_frequencies).
    """
    inverse = inverse_frequencies(shape.rope_theta, shape.rotary_dim, position_ids.device)
    angles = position_ids[..., None].float() * inverse
    mixed = angles[0].clone()
    for axis in (1, 2):
        places = slice(axis, 3 * shape.mrope_section[axis], 3)
        mixed[:, places] = angles[axis][:, places]
    return mixed


def vision_angles(patch_coordinates: torch.Tensor, shape: VisionShape) -> torch.Tensor:
    """(P, 2) rows and columns -> (P, head_dim / 2) float32: half of the pairs turn by the row, half by the column."""
    inverse = inverse_frequencies(shape.rope_theta, shape.head_dim // 2, patch_coordinates.device)
    return (patch_coordinates[..., None].float() * inverse).flatten(1)
