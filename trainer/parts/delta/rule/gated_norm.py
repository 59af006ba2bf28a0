"""RMS norm of each head, then the gate silu(z), with one kernel forward and one backward (Triton).

The weight is centred at one.
"""

import torch
import triton
import triton.language as tl

ROWS = 16
_PROGRAMS = 132 * 4  # programs of the backward pass; each sums the weight's gradient over its rows


@triton.jit
def _norm_forward(o, z, weight, out, rows, stride, eps, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)[None, :]
    inside = (row < rows)[:, None]
    at = row[:, None] * D + dim
    # Tokens of z are `stride` apart, the heads of a token are contiguous.
    at_gate = (row // H)[:, None] * stride + (row % H)[:, None] * D + dim
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + at_gate, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + dim).to(tl.float32)
    rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    tl.store(out + at, (x * rate * w * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    o, z, weight, d_out, d_o, d_z, sums, rows, stride, stride_dz, eps,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, D)[None, :]
    w = tl.load(weight + dim).to(tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + block * ROWS
        inside = (row < rows)[:, None]
        at = row[:, None] * D + dim
        at_gate = (row // H)[:, None] * stride + (row % H)[:, None] * D + dim
        x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(z + at_gate, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= rate
        soft = tl.sigmoid(gate)
        opened = gate * soft
        d_gate = dy * x * w * (soft + opened * (1.0 - soft))
        at_dz = (row // H)[:, None] * stride_dz + (row % H)[:, None] * D + dim
        tl.store(d_z + at_dz, d_gate.to(d_z.dtype.element_ty), mask=inside)
        total += dy * opened * x
        dx = dy * opened * w
        dx = rate * (dx - x * (tl.sum(dx * x, 1) / D)[:, None])
        tl.store(d_o + at, dx.to(d_o.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * D + tl.arange(0, D), tl.sum(total, 0))


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, z, weight, eps, places):
        o = o.contiguous()
        tokens, heads, dim = o.shape
        out, ctx.d_z = (None if x is None else x.view(o.shape) for x in places)
        out = torch.empty_like(o) if out is None else out
        rows = tokens * heads
        _norm_forward[(triton.cdiv(rows, ROWS),)](o, z, weight, out, rows, z.stride(0), eps, heads, dim, ROWS)
        ctx.save_for_backward(o, z, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx, d_out):
        o, z, weight = ctx.saved_tensors
        tokens, heads, dim = o.shape
        rows = tokens * heads
        d_o, d_z = torch.empty_like(o), torch.empty_like(o) if ctx.d_z is None else ctx.d_z
        programs = min(_PROGRAMS, triton.cdiv(rows, ROWS))
        sums = o.new_empty(programs, dim, dtype=torch.float32)
        _norm_backward[(programs,)](
            *(o, z, weight, d_out.contiguous(), d_o, d_z, sums, rows, z.stride(0), d_z.stride(0), ctx.eps),
            *(heads, dim, ROWS),
        )
        return d_o, d_z, sums.sum(0).to(weight.dtype), None, None


def gated_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    places: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Normalise o and gate it with z: (T, H, D) twice and (D,) -> (T, H, D), in float32 from the read to the write.

    Rows of z may be slices of wider rows; heads of z must be contiguous.

    Args:
        places: memory for the output (T, H * D) and for the gradient of z, laid out like z; None for new memory.
    """
    return _GatedNorm.apply(o, z, weight, eps, places)
