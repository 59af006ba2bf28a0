"""Attention cores over a packed bin that do not use Transformer Engine.

T = tokens (or patches) of the bin, t = tokens of a context-parallel rank, h = query heads, g = key-value heads,
d = head dim, n = segments.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from trainer.layers.gather import gather_sequence
from trainer.layers.segments import PackedSegments, ResultBuffers
from trainer.libraries.torch_private import efficient_attention, flash_attention

# The largest head dim for which cuDNN's gradients are right: tests/bench/results/attention.md.
CUDNN_HEAD_DIM = 128


class TorchVarlenAttention(torch.nn.Module):
    """Core attention by torch's scaled_dot_product_attention, one call per group of segments of similar length.

    With context parallelism every rank gathers the keys and values of all ranks and computes the rows of its own
    queries. This is exact, and as slow as a single rank.
    """

    def __init__(
        self, *, config, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, pg_collection=None, **_
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.causal = attn_mask_type == AttnMaskType.causal
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSegments, **_):
        """Attend: queries (t, h, d), keys and values (t, g, d) -> (t, h * d); t = T / cp."""
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
            # With a causal mask no real token sees the padding, which comes after it.
            seen = None if self.causal or bool(mask.all()) else mask[:, None, None]
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=self.causal, scale=self.scale, enable_gqa=True
            )
            out = out.index_put((places[mask],), o.transpose(1, 2)[mask])
        return out.reshape(len(out), -1)


class FlashAttention(TorchVarlenAttention):
    """Core attention by torch's flash kernels.

    Where FlashAttention 4 is not installed, the plain modules use it, and so do heads that Transformer Engine gets
    wrong: cuDNN's backward pass for a head dim above 128 reads a workspace that it has not written (9.19 on Hopper,
    Transformer Engine issue 2186). Where that memory held NaN, gradients are NaN. Flash kernels do not support float32,
    so float32 uses torch's memory-efficient kernels. A head dim that is not a multiple of 8 uses
    `TorchVarlenAttention`.

    With context parallelism every rank gathers the keys and values of all ranks. A rank holds two runs of each segment,
    in Transformer Engine's zigzag order, and computes each run against the keys up to the end of the run.
    """

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSegments, **_):
        """Attend: queries (t, h, d), keys and values (t, g, d) -> (t, h * d); t = T / cp."""
        if query.size(-1) % 8:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        if self.cp_group is None:
            pairs = (bounds, bounds), (longest, longest)
            return self._attend((query, key, value), *pairs, packed_seq_params.buffers).flatten(1)
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        key, value = (gather_sequence(x, packed_seq_params.cp_order, self.cp_group) for x in (key, value))
        out = torch.empty_like(query)
        run, longest_run = bounds // (2 * ranks), -(-longest // (2 * ranks))  # every segment has 2 * ranks equal runs
        for second, number in enumerate((rank, 2 * ranks - 1 - rank)):
            # Of each segment a rank holds its early run, then its late one.
            places = _token_indices(run, bounds // ranks + second * F.pad(run.diff(), (0, 1)), len(query) // 2)
            seen = run * (number + 1)
            keys = _token_indices(seen, bounds, len(query) // 2 * (number + 1))
            qkv = query.index_select(0, places), key.index_select(0, keys), value.index_select(0, keys)
            mine = self._attend(qkv, (run, seen), (longest_run, longest_run * (number + 1)))
            out = out.index_copy(0, places, mine)
        return out.flatten(1)

    def _attend(self, qkv, bounds, longest: tuple[int, int], buffers: ResultBuffers | None = None) -> torch.Tensor:
        """Return (queries, h, d), given the cumulative numbers of the segments' queries and of their keys, and these
        numbers of the longest segment."""
        query, key, value = qkv
        if query.dtype is torch.float32:  # which flash kernels do not support
            # The memory-efficient kernels know no groups of query heads.
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
            from_the_end = 2  # causal mask aligned at the last key, as in the flash kernels
            return efficient_attention(
                *(query[None], key[None], value[None], None, *bounds, *longest),
                *(0.0, from_the_end if self.causal else 0, True),  # dropout, mask, and the sums that backward needs
                scale=self.scale,
            )[0][0]
        query, key, value = (x.contiguous() for x in qkv)
        settings = (0.0, self.causal, False)  # dropout; causal, aligned at the last key; no mask for debugging
        return flash_attention(query, key, value, *bounds, *longest, *settings, scale=self.scale)[0]


def _token_indices(bounds: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """Return (count,) int64 token indices of segments with these cumulative lengths and start indices."""
    lengths = bounds.diff().long()
    # output_size avoids a wait for the device.
    shift = torch.repeat_interleave((starts - bounds)[:-1].long(), lengths, output_size=count)
    return torch.arange(count, device=bounds.device) + shift
