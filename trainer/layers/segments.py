"""The segments of a packed bin and the rotation of their tokens, for everything that mixes the tokens of a segment.

T = tokens (or patches) of the bin, h = heads, d = head dim, n = segments.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.checkpoint import checkpoint

from trainer.data.packed_chunks import PackedChunks
from trainer.model.shape import DecoderShape


def inverse_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """(dim / 2,) float32: radians per position for each pair of the `dim` numbers that are turned."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def rope_angles(positions: torch.Tensor, theta: float, dim: int) -> torch.Tensor:
    """(t,) positions -> (t, dim / 2) float32, one angle per pair."""
    return positions[:, None].float() * inverse_frequencies(theta, dim, positions.device)


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


class Rotation(NamedTuple):
    """Rotary embedding: x * cos + (-x2, x1) * sin in float32, back in x's dtype; each angle turns a pair of the halves.

    Fewer angles than d / 2 turn the first numbers of a head and leave the others as they are.

    Args:
        cos: (T, d / 2) float32.
        sin: the same.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, angles: torch.Tensor) -> "Rotation":
        """(T, d / 2) float32 angles."""
        return cls(angles.cos(), angles.sin())

    def turn(self, x_Thd: torch.Tensor) -> torch.Tensor:
        """Queries or keys, each token by its angles."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        turned, rest = x_Thd.split((2 * cos.size(-1), x_Thd.size(-1) - 2 * cos.size(-1)), dim=-1)
        first, second = turned.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_Thd.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned


def recomputed(module: torch.nn.Module, *args: object, is_random: bool = False, **kwargs: object):
    """The output of `module`, which is computed again in the backward pass: only its inputs are kept.

    Args:
        is_random: it draws numbers, which have to be the same again.
    """
    return checkpoint(module, *args, use_reentrant=False, preserve_rng_state=is_random, **kwargs)


@dataclass
class PackedSegments(PackedSeqParams):
    """PackedSeqParams with what our own cores need: how context-parallel ranks hold the bin, its segments in groups of
    similar length, and cut into chunks.

    Attributes:
        cp: context-parallel ranks.
        cp_order: (T,) places of the bin in the order in which these ranks hold them; None or empty if there is one.
        chunks: for layers that take the segments in chunks.
    """

    cp: int = 1
    cp_order: torch.Tensor | None = None
    chunks: PackedChunks | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        cp: int = 1,
        cp_order: torch.Tensor | None = None,
        chunks: PackedChunks | None = None,
    ) -> "PackedSegments":
        """Segments without gaps."""
        # If Transformer Engine gets padded and unpadded bounds, it compares them on the host, once per layer. So it
        # gets both only with context parallelism, which needs them.
        padded = None if cp == 1 else cu_seqlens
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            cp=cp,
            cp_order=cp_order,
            chunks=chunks,
        )

    @cached_property
    def groups(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group of n segments of similar length, m at most: places and mask, both (n, m).

        A place is the token's number in T, 0 where the mask is False. At most half of a row is filling, because the
        lengths of a group round up to the same power of two.
        """
        starts, stops = self.cu_seqlens_q[:-1].long(), self.cu_seqlens_q[1:].long()
        lengths = stops - starts
        width = torch.pow(2, torch.ceil(torch.log2(lengths.clamp(min=1).double()))).long()
        groups = []
        for size in width.unique().tolist():
            chosen = width == size
            longest = int(lengths[chosen].max())
            offsets = torch.arange(longest, device=lengths.device)
            mask = offsets < lengths[chosen][:, None]
            groups.append(((starts[chosen][:, None] + offsets) * mask, mask))
        return groups
