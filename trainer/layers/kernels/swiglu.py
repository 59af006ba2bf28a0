"""silu(first half) * second half, with one kernel forward and one backward (Triton, CUDA only).

Each value is read and written once.
"""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 1024, 4  # values of a row per program; warps


@triton.jit
def _swiglu_fwd(gate_up, out, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_up + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_bwd(d_out, gate_up, d_gate_up, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    at = row * 2 * F + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + F, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row * F + column, mask=inside, other=0.0).to(tl.float32)
    soft = tl.sigmoid(gate)
    opened = gate * soft
    tl.store(d_gate_up + at, (dy * up * (soft + opened * (1.0 - soft))).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + at + F, (dy * opened).to(d_gate_up.dtype.element_ty), mask=inside)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.size(-1) // 2)
        _swiglu_fwd[_grid(out)](gate_up, out, out.size(-1), BLOCK=_BLOCK, num_warps=_WARPS)
        return out

    @staticmethod
    def backward(ctx, d_out):
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty_like(gate_up)
        grid = _grid(d_out)
        _swiglu_bwd[grid](d_out.contiguous(), gate_up, d_gate_up, d_out.size(-1), BLOCK=_BLOCK, num_warps=_WARPS)
        return d_gate_up


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return out.numel() // out.size(-1), triton.cdiv(out.size(-1), _BLOCK)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half: (..., 2 F) -> (..., F), in float32 from the read to the write."""
    return _Swiglu.apply(gate_up)
