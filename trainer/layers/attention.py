"""Self-attention over a packed bin: rotation by explicit angles, and the cores that are not Transformer Engine's.

T = tokens (or patches) of the bin, t = those of a context-parallel rank, h = query heads, g = key-value heads,
d = head dim, n = segments.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

from trainer.data.packed_chunks import PackedChunks
from trainer.layers.gather import gather_sequence
from trainer.layers.kernels.permission import can_import, kernels_run

if can_import():
    from trainer.layers.kernels.qkv import split_norm_rotate

CUDNN_HEAD_DIM = 128  # the largest for which cuDNN's gradients are right


def inverse_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """(dim / 2,) float32: radians per position for each pair of the `dim` numbers that are turned."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def rope_angles(positions: torch.Tensor, theta: float, dim: int) -> torch.Tensor:
    """(t,) positions -> (t, dim / 2) float32, one angle per pair."""
    return positions[:, None].float() * inverse_frequencies(theta, dim, positions.device)


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


class RotarySelfAttention(SelfAttention):
    """megatron-core's self-attention for packed training, in the pieces of a PackedLayer. It applies the angles itself.

    megatron-core 0.16.1 guesses from a length which of two meanings the angles of a packed sequence have, and its
    fused rotation uses the first angles for every segment; both are wrong for positions with three axes.
    """

    def forward(self, *_: object, **__: object):
        raise NotImplementedError("a PackedLayer calls prepare, attend and linear_proj")

    def prepare(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """(T, 1, D) -> queries (T, h, d), keys and values (T, g, d), turned."""
        is_whole = 2 * rotation.cos.size(-1) == self.hidden_size_per_attention_head
        if is_whole and kernels_run(hidden_states.device):
            return self._prepare_fused(hidden_states, rotation)
        query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
        return rotation.turn(query), rotation.turn(key), value

    def attend(self, query, key, value, segments: "PackedSegments") -> torch.Tensor:
        """The values of `prepare` -> (T, 1, h * d)."""
        core = partial(recomputed, self.core_attention) if self.checkpoint_core_attention else self.core_attention
        out = core(query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=segments)
        return out.view(out.size(0), 1, -1)

    def modules_of_prepare(self) -> list[torch.nn.Module]:
        """The modules whose parameters `prepare` uses."""
        modules = (self.linear_qkv, self.q_layernorm, self.k_layernorm)
        return [module for module in modules if module is not None]

    @property
    def attended_width(self) -> int:
        """h * d, the width of `attend`'s output."""
        return self.num_attention_heads_per_partition * self.hidden_size_per_attention_head

    def _prepare_fused(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """The same as `prepare`, by one kernel after the projection."""
        mixed, _ = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
        return split_norm_rotate(
            mixed.reshape(len(mixed), -1),
            *rotation,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
            None if self.q_layernorm is None else self.q_layernorm.weight,
            None if self.k_layernorm is None else self.k_layernorm.weight,
            self.config.layernorm_epsilon,
        )


class GatedSelfAttention(RotarySelfAttention):
    """Each head's output is multiplied by the sigmoid of its gate, which `linear_qkv` gives beside the queries."""

    def prepare(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """(T, 1, D) -> queries (T, h, d), keys and values (T, g, d), turned, and gates (T, h, d)."""
        projected = self.get_query_key_value_tensors(hidden_states, output_gate=True)
        query, key, value, gate = (x.squeeze(1) for x in projected)
        return rotation.turn(query), rotation.turn(key), value, gate

    def attend(self, query, key, value, gate, segments: "PackedSegments") -> torch.Tensor:
        """The values of `prepare` -> (T, 1, h * d)."""
        return super().attend(query, key, value, segments) * gate.sigmoid().flatten(1)[:, None]


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


class TorchVarlenAttention(torch.nn.Module):
    """Core attention by torch's scaled_dot_product_attention, one call per group of segments of similar length.

    With context parallel every rank gathers the keys and values of all ranks and computes the rows of its own queries:
    as slow as one rank alone, and exact.
    """

    def __init__(
        self, *, config, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, pg_collection=None, **_
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.causal = attn_mask_type == AttnMaskType.causal
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSegments, **_):
        """(t, h, d), (t, g, d), (t, g, d) -> (t, h * d); t = T / cp."""
        if self.cp_group is None:
            return self._whole(query, key, value, packed_seq_params)
        order = packed_seq_params.cp_order
        mine = order.chunk(self.cp_group.size())[self.cp_group.rank()]
        key, value = (gather_sequence(x, order, self.cp_group) for x in (key, value))
        # Other ranks' queries are zero here and their rows are dropped: no gradient comes from them.
        query = query.new_zeros(len(order), *query.shape[1:]).index_copy(0, mine, query)
        return self._whole(query, key, value, packed_seq_params).index_select(0, mine)

    def _whole(self, query, key, value, segments: PackedSegments) -> torch.Tensor:
        out = query.new_zeros(query.shape)
        for places, mask in segments.groups:
            q, k, v = (x[places].transpose(1, 2) for x in (query, key, value))
            # With a causal mask no real token sees the filling, which comes after it.
            seen = None if self.causal or bool(mask.all()) else mask[:, None, None]
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=self.causal, scale=self.scale, enable_gqa=True
            )
            out = out.index_put((places[mask],), o.transpose(1, 2)[mask])
        return out.reshape(len(out), -1)


class FlashAttention(TorchVarlenAttention):
    """Core attention by torch's flash kernels: of the plain modules, and for heads that Transformer Engine gets wrong:
    cuDNN's backward pass for heads of more than 128 numbers reads a workspace that it has not written (9.19 on Hopper,
    Transformer Engine issue 2186). Where that memory held NaN, gradients are NaN. float32, which flash kernels do not
    have, goes by torch's memory-efficient ones. Heads of a number that is no multiple of 8 go the plain way.

    With context parallel every rank gathers the keys and values of all ranks. It holds two runs of each segment, as
    Transformer Engine's zigzag deals them, and computes each against the keys up to its end.
    """

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSegments, **_):
        """(t, h, d), (t, g, d), (t, g, d) -> (t, h * d); t = T / cp."""
        if query.size(-1) % 8:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        if self.cp_group is None:
            return self._attend(query, key, value, bounds, bounds, longest, longest).flatten(1)
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        key, value = (gather_sequence(x, packed_seq_params.cp_order, self.cp_group) for x in (key, value))
        out = torch.empty_like(query)
        run, longest_run = bounds // (2 * ranks), -(-longest // (2 * ranks))  # every segment has 2 * ranks equal runs
        for second, number in enumerate((rank, 2 * ranks - 1 - rank)):
            places = _places(run, bounds // ranks + second * F.pad(run.diff(), (0, 1)), len(query) // 2)
            seen = run * (number + 1)
            keys = _places(seen, bounds, len(query) // 2 * (number + 1))
            mine = self._attend(
                *(query.index_select(0, places), key.index_select(0, keys), value.index_select(0, keys)),
                *(run, seen, longest_run, longest_run * (number + 1)),
            )
            out = out.index_copy(0, places, mine)
        return out.flatten(1)

    def _attend(self, query, key, value, query_bounds, key_bounds, most_queries: int, most_keys: int) -> torch.Tensor:
        """Of each segment, (h, d) of every query; the last query sees all its segment's keys, each before one fewer."""
        if query.dtype is torch.float32:
            return self._attend_exactly(query, key, value, query_bounds, key_bounds, most_queries, most_keys)
        return torch.ops.aten._flash_attention_forward(
            *(query.contiguous(), key.contiguous(), value.contiguous(), query_bounds, key_bounds),
            *(most_queries, most_keys, 0.0, self.causal, False),
            scale=self.scale,
        )[0]

    def _attend_exactly(self, query, key, value, query_bounds, key_bounds, most_queries: int, most_keys: int):
        heads_per_group = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(heads_per_group, dim=1) for x in (key, value))
        from_the_end = 2  # the mask that flash kernels have for `causal`
        return torch.ops.aten._efficient_attention_forward(
            *(query[None], key[None], value[None], None, query_bounds, key_bounds, most_queries, most_keys),
            *(0.0, from_the_end if self.causal else 0, True),
            scale=self.scale,
        )[0][0]


def _places(bounds: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) int64 places of the tokens whose cumulated lengths are `bounds`, if segment i begins at starts[i]."""
    lengths = bounds.diff().long()
    shift = torch.repeat_interleave((starts - bounds)[:-1].long(), lengths, output_size=count)  # no wait for the device
    return torch.arange(count, device=bounds.device) + shift
