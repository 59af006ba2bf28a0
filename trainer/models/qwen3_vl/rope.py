"""Rotary angles: interleaved mrope for the language model, row and column for the vision encoder."""

import torch

from trainer.models.qwen3_vl.config import LanguageSizes, VisionSizes


def _inverse_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def mrope_angles(position_ids: torch.Tensor, sizes: LanguageSizes) -> torch.Tensor:
    """(3, T) positions -> (T, head_dim / 2) float32, an angle for each pair.

    Pairs alternate t, h, w, t, h, w, ... as far as each axis' section goes; the rest are t's
    (transformers 5.23, Qwen3VLTextRotaryEmbedding.recomposition_frequencies).
    """
    inverse = _inverse_frequencies(sizes.rope_theta, sizes.head_dim, position_ids.device)
    angles = position_ids[..., None].float() * inverse
    mixed = angles[0].clone()
    for axis in (1, 2):
        places = slice(axis, 3 * sizes.mrope_section[axis], 3)
        mixed[:, places] = angles[axis][:, places]
    return mixed


def vision_angles(patch_coordinates: torch.Tensor, sizes: VisionSizes) -> torch.Tensor:
    """(P, 2) rows and columns -> (P, head_dim / 2) float32: half of the pairs turn by each."""
    inverse = _inverse_frequencies(sizes.rope_theta, sizes.head_dim // 2, patch_coordinates.device)
    return (patch_coordinates[..., None].float() * inverse).flatten(1)
