"""Attention of wide heads: what context-parallel ranks compute of it, with torch in the place of the kernels."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from trainer.layers import attention_cores
from trainer.layers.attention_cores import FlashAttention
from trainer.layers.segments import PackedSegments

HEADS, GROUPS, DIM = 4, 2, 8


def attend(self, qkv, bounds, longest, buffers=None) -> torch.Tensor:
    """Segment by segment; the mask of causal attention begins at the last query and the last key."""
    (query, key, value), outs = qkv, []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(x.tolist()) for x in bounds), strict=True):
        assert q1 - q0 <= longest[0]
        assert k1 - k0 <= longest[1]
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def order_of(bounds: list[int], ranks: int) -> torch.Tensor:
    """The places of the bin in the order in which the ranks hold them: runs r and 2 * ranks - 1 - r of each segment."""
    held = []
    for rank in range(ranks):
        for start, stop in itertools.pairwise(bounds):
            runs = torch.arange(start, stop).chunk(2 * ranks)
            held += [runs[rank], runs[2 * ranks - 1 - rank]]
    return torch.cat(held)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_compute_the_whole_bin(ranks, monkeypatch):
    lengths = [2 * ranks * n for n in (1, 7, 3, 1, 12)]
    bounds = [0, *itertools.accumulate(lengths)]
    torch.manual_seed(0)
    shapes = ((bounds[-1], n, DIM) for n in (HEADS, GROUPS, GROUPS))
    query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    order, cu = order_of(bounds, ranks), torch.tensor(bounds, dtype=torch.int32)
    segments = PackedSegments.of(cu, max(lengths), ranks, order)
    monkeypatch.setattr(FlashAttention, "_attend", attend)

    def core(cp: int, rank: int = 0) -> FlashAttention:
        groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: ranks, rank=lambda: rank))
        config = SimpleNamespace(context_parallel_size=cp)
        return FlashAttention(config=config, attn_mask_type=AttnMaskType.causal, pg_collection=groups)

    whole = core(1)(query, key, value, packed_seq_params=segments)
    # Every rank's keys and values lie in the whole ones, so gathering them is to take these.
    gathered = iter([key, value] * ranks)
    monkeypatch.setattr(attention_cores, "gather_sequence", lambda *_: next(gathered))
    parts = []
    for rank, mine in enumerate(order.chunk(ranks)):
        part = core(ranks, rank)(query[mine], key[mine], value[mine], packed_seq_params=segments)
        torch.testing.assert_close(part, whole[mine], rtol=1e-12, atol=1e-12)
        parts.append(part)
    weights = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weights).sum(), (query, key, value))
    found = torch.autograd.grad((torch.cat(parts) * weights[order]).sum(), (query, key, value))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
