"""The gates of attention's heads: x * sigmoid(gate), one kernel forward and one backward (Triton, CUDA only)."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _gate_forward(x, gate, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * opened, mask=inside)


@triton.jit
def _gate_backward(grad, x, gate, d_x, d_gate, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    passed = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * opened
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_x + at, passed, mask=inside)
    tl.store(d_gate + at, passed * value * (1.0 - opened), mask=inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate)
        out = torch.empty_like(x)
        _gate_forward[(triton.cdiv(x.numel(), _BLOCK),)](x, gate, out, x.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
        grid = (triton.cdiv(x.numel(), _BLOCK),)
        _gate_backward[grid](grad.contiguous(), x, gate, d_x, d_gate, x.numel(), BLOCK=_BLOCK)
        return d_x, d_gate


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) in x's dtype and shape, computed in float32.

    Args:
        gate: as many numbers as `x`, in the same order.
    """
    return _Gated.apply(x, gate)
