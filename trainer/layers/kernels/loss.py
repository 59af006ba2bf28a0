"""Softmax and cross entropy over rows of logits, in place (Triton, CUDA only).

The logits are read once forward, and read and written once backward; float32 values exist only in registers. Plain
torch makes a float32 copy and passes over it about ten times.

n = rows, W = words of the vocabulary that this rank holds.
"""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8  # words per step or program; warps


# These are rows of one tensor, aligned or not depending on its length: do not compile once for each case.
@triton.jit(do_not_specialize_on_alignment=["largest", "total", "chosen"])
def _summarize(logits, places, largest, total, chosen, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * W
    highest = tl.full((), float("-inf"), tl.float32)
    amount = tl.zeros((), tl.float32)
    for start in range(0, W, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(logits + word, mask=word < W, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        amount = amount * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    place = tl.load(places + row)
    here = (place >= 0) & (place < W)
    tl.store(largest + row, highest)
    tl.store(total + row, amount)
    tl.store(chosen + row, tl.load(logits + place, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _differentiate(logits, places, largest, scale, upstream, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * W + word
    x = tl.load(at, mask=word < W, other=0.0).to(tl.float32)
    grad = tl.exp(x - tl.load(largest + row)) * tl.load(scale + row)
    grad -= tl.where(word == tl.load(places + row), tl.load(upstream + row), 0.0)
    tl.store(at, grad, mask=word < W)


def summarize(logits: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out`, for each row of (n, W) logits: the largest, the sum of exp(logit - largest), the label's logit.

    Args:
        places: (n,) int64 index of the label's logit in each row; outside 0..W-1 that logit counts as 0.
        out: (3, n) float32, rows contiguous.
    """
    _summarize[(len(logits),)](logits, places, *out, logits.size(1), BLOCK=_BLOCK, num_warps=_WARPS)


def differentiate(
    logits: torch.Tensor, places: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, upstream: torch.Tensor
) -> None:
    """Overwrite (n, W) logits with their gradient, (softmax - one_hot(label)) * upstream.

    Args:
        largest, total: (n,) float32, over the words of all ranks.
        places: see `summarize`.
        upstream: (n,) float32.
    """
    words = logits.size(1)
    grid = (len(logits), triton.cdiv(words, _BLOCK))
    scale = upstream / total
    _differentiate[grid](logits, places, largest, scale, upstream, words, BLOCK=_BLOCK, num_warps=_WARPS)
