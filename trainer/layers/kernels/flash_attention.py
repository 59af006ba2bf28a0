"""Core attention by torch's flash kernels, for heads that Transformer Engine gets wrong.

cuDNN's backward pass for heads of more than 128 numbers reads a workspace that it has not written (9.19 on Hopper,
Transformer Engine issue 2186): where that memory held NaN, gradients are NaN, and nothing says so.

T = tokens of the bin, t = those of a context-parallel rank, h = query heads, g = key-value heads, d = head dim.
"""

import torch
import torch.nn.functional as F

from trainer.layers.attention import PackedSegments, TorchVarlenAttention
from trainer.layers.gather import gather_sequence

CUDNN_HEAD_DIM = 128  # the largest for which cuDNN's gradients are right


class FlashAttention(TorchVarlenAttention):
    """Attention inside each segment of a packed bin. float32, which flash kernels do not have, goes the plain way.

    With context parallel every rank gathers the keys and values of all ranks. It holds two runs of each segment, as
    Transformer Engine's zigzag deals them, and computes each against the keys up to its end.
    """

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSegments, **_):
        """(t, h, d), (t, g, d), (t, g, d) -> (t, h * d); t = T / cp."""
        if query.dtype is torch.float32:
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
        return torch.ops.aten._flash_attention_forward(
            *(query.contiguous(), key.contiguous(), value.contiguous(), query_bounds, key_bounds),
            *(most_queries, most_keys, 0.0, self.causal, False),
            scale=self.scale,
        )[0]


def _places(bounds: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) int64 places of the tokens whose cumulated lengths are `bounds`, if segment i begins at starts[i]."""
    lengths = bounds.diff().long()
    shift = torch.repeat_interleave((starts - bounds)[:-1].long(), lengths, output_size=count)  # no wait for the device
    return torch.arange(count, device=bounds.device) + shift
