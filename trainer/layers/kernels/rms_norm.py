"""RMS norm with one kernel forward and one backward (Triton, CUDA only).

torch's own needs a weight of its input's dtype. A zero-centred weight, where 1 + weight is float32, would cost three
more passes.

D = values of a row.
"""

import torch
import triton
import triton.language as tl

_NUMBERS = 2048  # values that a program handles at a time, but at least one row
_PROGRAMS = 132 * 2  # programs of the backward pass; each sums the weight's gradient over its rows


@triton.jit
def _rms_norm_fwd(
    x, weight, out, rows, eps, CENTRE: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_P2)[None, :]
    inside = (row < rows)[:, None] & (column < D)
    at = row[:, None] * D + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + CENTRE
    rate = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    tl.store(out + at, (value * rate * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_bwd(
    x, weight, d_out, d_x, sums, rows, eps,
    CENTRE: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D_P2)[None, :]
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + CENTRE
    total = tl.zeros((ROWS, D_P2), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + block * ROWS
        inside = (row < rows)[:, None] & (column < D)
        at = row[:, None] * D + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        rate = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= rate
        total += dy * value
        dy *= w
        dx = rate * (dy - value * (tl.sum(dy * value, 1) / D)[:, None])
        tl.store(d_x + at, dx.to(d_x.dtype.element_ty), mask=inside)
    place = tl.arange(0, D_P2)
    tl.store(sums + tl.program_id(0) * D + place, tl.sum(total, 0), mask=place < D)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, centre):
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.centre = eps, centre
        out, shape = torch.empty_like(x), row_blocks(x)
        rows = x.numel() // x.size(-1)
        grid = (triton.cdiv(rows, shape["ROWS"]),)
        _rms_norm_fwd[grid](x, weight, out, rows, eps, CENTRE=centre, **shape)
        return out

    @staticmethod
    def backward(ctx, d_out):
        x, weight = ctx.saved_tensors
        shape, d_x = row_blocks(x), torch.empty_like(x)
        rows = x.numel() // x.size(-1)
        programs = min(_PROGRAMS, triton.cdiv(rows, shape["ROWS"]))
        sums = x.new_empty(programs, x.size(-1), dtype=torch.float32)
        _rms_norm_bwd[(programs,)](x, weight, d_out.contiguous(), d_x, sums, rows, ctx.eps, CENTRE=ctx.centre, **shape)
        return d_x, sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def row_blocks(x: torch.Tensor) -> dict[str, int]:
    """Return the constants of a kernel whose programs each handle some rows (D,) of x at a time."""
    width = triton.next_power_of_2(x.size(-1))
    return {"D": x.size(-1), "D_P2": width, "ROWS": max(1, _NUMBERS // width), "num_warps": 4 if width <= 2048 else 8}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool = False) -> torch.Tensor:
    """Normalise (..., D) with the weight (D,), computed in float32 from the read to the write.

    Args:
        zero_centred: whether to multiply by 1 + weight.
    """
    return _RmsNorm.apply(x, weight, eps, float(zero_centred))
