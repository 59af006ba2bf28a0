"""A packed bin as the layers see it: its segments, the rotation of its tokens, the tokens to route or to compute.

T = tokens (or patches) of the bin, t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t;
h = heads, d = head dim, D = hidden size, n = segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.distributed import ProcessGroup

from trainer.data.micro_batch import MicroBatch
from trainer.data.packed_chunks import PackedChunks
from trainer.model.shape import DecoderShape


@cache
def inverse_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """Return (dim / 2,) float32: radians per position for each pair of the `dim` rotated components. Computed once; do
    not change it."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def rope_angles(positions: torch.Tensor, theta: float, dim: int) -> torch.Tensor:
    """Return the angles of (t,) positions: (t, dim / 2) float32, one angle per pair."""
    return positions[:, None].float() * inverse_frequencies(theta, dim, positions.device)


def mrope_angles(position_ids: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """Return the angles of (3, T) positions: (T, rotary_dim / 2) float32, one angle per pair.

    Pairs alternate t, h, w, t, h, w, ... up to the end of each axis' section; the remaining pairs use t
    (transformers 5.23, Qwen3VLTextRotaryEmbedding.recomposition_frequencies).
    """
    inverse = inverse_frequencies(shape.rope_theta, shape.rotary_dim, position_ids.device)
    # float32 is exact up to position 2^24.
    angles = position_ids[..., None].float() * inverse
    mixed = angles[0].clone()
    for axis in (1, 2):
        places = slice(axis, 3 * shape.mrope_section[axis], 3)
        mixed[:, places] = angles[axis][:, places]
    return mixed


class Rotation(NamedTuple):
    """Rotary embedding: x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of x.

    It is computed in float32 and returned in x's dtype. Each angle rotates a pair with one component from each half.
    With fewer angles than d / 2 only the leading components of a head are rotated.
    """

    cos: torch.Tensor  # (T, d / 2) float32
    sin: torch.Tensor  # (T, d / 2) float32

    @classmethod
    def of(cls, angles: torch.Tensor) -> "Rotation":
        return cls(angles.cos(), angles.sin())

    def rotate(self, x_Thd: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys, each token by its angles."""
        cos, sin = self.cos[:, None], self.sin[:, None]  # the same for all heads
        turned, rest = x_Thd.split((2 * cos.size(-1), x_Thd.size(-1) - 2 * cos.size(-1)), dim=-1)
        first, second = turned.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_Thd.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned


def joined(slices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the (T, widths together) tensor whose rows these (T, width) tensors divide in their order, without a copy.
    If they do not, or if there are none, return None."""
    if not slices:
        return None
    first, width = slices[0], sum(x.size(-1) for x in slices)
    place = first.storage_offset()
    for x in slices:
        is_next = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and x.storage_offset() == place
        if not is_next or x.stride() != (width, 1):
            return None
        place += x.size(1)
    return first.as_strided((len(first), width), (width, 1))


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The tokens of a bin that the rest of the model computes: after the last attention, those with a loss."""

    index: torch.Tensor  # (m,) int64 indices into the t tokens
    # the tensor-parallel ranks, if sequence parallelism divides the tokens among them. Each rank then holds m / tp of
    # the selected rows. None if every rank holds all tokens.
    sharers: ProcessGroup | None

    @classmethod
    def of(cls, index: torch.Tensor, sharers: ProcessGroup | None, multiple: int) -> "SelectedRows":
        """Select the rows of `index` (N,), padded to a multiple of `multiple` rows on each rank."""
        multiple *= 1 if sharers is None else sharers.size()
        # At least one row, so that no module needs a special case for matrix products of zero rows.
        size = max(1, -(-len(index) // multiple)) * multiple
        return cls(F.pad(index, (0, size - len(index))), sharers)

    def of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Select the rows of (s, 1, D): (m, 1, D), or this rank's (m / tp, 1, D) with sequence parallelism."""
        if self.sharers is None:
            return hidden.index_select(0, self.index)
        whole = gather_from_sequence_parallel_region(hidden, group=self.sharers)
        return whole.index_select(0, self.index.chunk(self.sharers.size())[self.sharers.rank()])

    def of_attended(self, attended: torch.Tensor) -> torch.Tensor:
        """Select the rows of this rank's heads: (t, 1, width) -> (m, 1, width)."""
        return attended.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The tokens of a bin that layers route.

    s = tokens of this rank, after context and sequence parallelism.
    """

    is_token: torch.Tensor  # (s,) bool, False for padding
    num_tokens: int  # number of tokens of the bin, over all ranks
    num_loss_tokens: int  # number of loss tokens of the bin, over all ranks
    sharers: Sequence[ProcessGroup]  # the groups of ranks that hold different tokens of the bin

    @classmethod
    def of(cls, batch: MicroBatch, cp: ProcessGroup, tp: ProcessGroup | None) -> "RoutedTokens":
        """Return the tokens of a batch; `tp` are the tensor-parallel ranks if sequence parallelism divides the tokens
        among them."""
        is_token, groups = batch.is_token, [group for group in (cp, tp) if group is not None and group.size() > 1]
        if tp is not None:
            is_token = is_token.chunk(tp.size())[tp.rank()]
        return cls(is_token, batch.num_tokens, batch.num_loss_tokens, groups)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor without gradient, summed over all ranks that hold different tokens of the bin."""
        for group in self.sharers:
            dist.all_reduce(x, group=group)
        return x


class ResultBuffers(NamedTuple):
    """Memory for the results of an attention, or of what replaces it: the tensors that CUDA graphs read. A core that
    cannot write into them takes new memory, and the graphs copy."""

    out: torch.Tensor | None  # (T, 1, h * d) for its output; None for new memory
    grads: Sequence[torch.Tensor] = ()  # for the gradients of its inputs; empty for new memory


@dataclass
class PackedSegments(PackedSeqParams):
    """PackedSeqParams with the additional data that our own cores need."""

    cp: int = 1  # number of context-parallel ranks
    # (T,) indices of the bin's tokens in the order that these ranks hold them; None or empty if cp is 1
    cp_order: torch.Tensor | None = None
    chunks: PackedChunks | None = None  # the segments cut into chunks, for layers that need them
    routed: RoutedTokens | None = None  # the tokens of the bin, for layers that route them
    buffers: ResultBuffers | None = None  # where the next attention may leave its results

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        cp: int = 1,
        cp_order: torch.Tensor | None = None,
        chunks: PackedChunks | None = None,
        routed: RoutedTokens | None = None,
    ) -> "PackedSegments":
        """Return segments without gaps."""
        # If Transformer Engine gets padded and unpadded bounds, it compares them on the host, once per layer. So it
        # gets both only with context parallelism, which needs both.
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
            routed=routed,
        )

    @cached_property
    def groups(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Token indices and mask, both (n, m), of each group of n segments of similar length, at most m tokens.

        An index is 0 where the mask is False. At most half of a row is padding, because the lengths of a group round up
        to the same power of two.
        """
        starts, stops = self.cu_seqlens_q[:-1].long(), self.cu_seqlens_q[1:].long()
        lengths = stops - starts
        width = torch.pow(2, torch.ceil(torch.log2(lengths.clamp(min=1).double()))).long()
        groups = []
        # One padded call would be quadratic in the longest segment, which may be the padding at the end of the bin. One
        # call for each segment would be dozens a layer for bins of short samples.
        for size in width.unique().tolist():
            chosen = width == size
            longest = int(lengths[chosen].max())
            offsets = torch.arange(longest, device=lengths.device)
            mask = offsets < lengths[chosen][:, None]
            groups.append(((starts[chosen][:, None] + offsets) * mask, mask))
        return groups
