"""Triton kernels over rows, for CUDA: the RMS norm with the sum before it, SwiGLU, the cross entropy, float8 weights.

`tests/parity/test_plain_kernels_gpu.py` and `test_loss_kernel_gpu.py` compare them with plain torch. Import this file
only where `kernel_support.can_import` allows it.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

# RMS norm, with the sum before it, in one kernel forward and one backward. D = values of a row.
#
# torch's own needs a weight of its input's dtype. A zero-centred weight, where 1 + weight is float32, would cost three
# more passes. In a layer the norm's input is a sum, to which the layer adds again. One by one, the sum, the norm and
# their gradients would read and write 11 times in place of 8.

# Values that a program handles at a time, but at least one row; of vision's layer norm too (`norm_kernel.py`).
_NORM_NUMBERS = 2048
# For the backward pass, by the width of a row: rows at a time, warps, and programs, each of which sums the weight's
# gradient over its rows. On an H200 it takes 14% to 36% less time than with the values of `row_blocks`, 264 programs.
_NORM_BACKWARD = {2048: (2, 8, 132 * 3), 4096: (2, 4, 132 * 2)}


@triton.jit
def _sum_norm_fwd(
    x, delta, weight, total, out, rows, eps,
    CENTRE: tl.constexpr, ADD: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_P2)[None, :]
    inside = (row < rows)[:, None] & (column < D)
    at = row[:, None] * D + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        # The norm is that of the rounded sum, which later operations read.
        value = rounded.to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + CENTRE
    rate = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    tl.store(out + at, (value * rate * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_norm_bwd(
    total, weight, d_total, d_out, d_x, sums, rows, eps,
    CENTRE: tl.constexpr, ADD: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D_P2)[None, :]
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + CENTRE
    of_weight = tl.zeros((ROWS, D_P2), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + block * ROWS
        inside = (row < rows)[:, None] & (column < D)
        at = row[:, None] * D + column
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        rate = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        along = tl.sum(dy * w * value, 1)[:, None] / D
        value *= rate
        of_weight += dy * value
        dx = rate * (dy * w - value * (along * rate))
        if ADD:
            dx += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, dx.to(d_x.dtype.element_ty), mask=inside)
    place = tl.arange(0, D_P2)
    tl.store(sums + tl.program_id(0) * D + place, tl.sum(of_weight, 0), mask=place < D)


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, eps, centre):
        x = x.contiguous()
        delta = None if delta is None else delta.contiguous()
        total, out, shape = x if delta is None else torch.empty_like(x), torch.empty_like(x), row_blocks(x)
        rows = x.numel() // x.size(-1)
        grid = (triton.cdiv(rows, shape["ROWS"]),)
        _sum_norm_fwd[grid](x, delta, weight, total, out, rows, eps, CENTRE=centre, ADD=delta is not None, **shape)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.centre, ctx.adds = eps, centre, delta is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total, d_out):
        total, weight = ctx.saved_tensors
        if d_out is None:
            return d_total, d_total if ctx.adds else None, None, None, None
        shape, d_x = row_blocks(total), torch.empty_like(total)
        rows = total.numel() // total.size(-1)
        at_a_time, warps, most = _NORM_BACKWARD.get(shape["D_P2"], (shape["ROWS"], shape["num_warps"], 132 * 2))
        shape |= {"ROWS": at_a_time, "num_warps": warps}
        programs = min(most, triton.cdiv(rows, at_a_time))
        sums = total.new_empty(programs, total.size(-1), dtype=torch.float32)
        d_total = None if d_total is None else d_total.contiguous()
        _sum_norm_bwd[(programs,)](
            *(total, weight, d_total, d_out.contiguous(), d_x, sums, rows, ctx.eps),
            CENTRE=ctx.centre,
            ADD=d_total is not None,
            **shape,
        )
        d_weight = sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return d_x, d_x if ctx.adds else None, d_weight, None, None


def row_blocks(x: torch.Tensor) -> dict[str, int]:
    """Return the constants of a kernel whose programs each handle some rows (D,) of x at a time."""
    width = triton.next_power_of_2(x.size(-1))
    return {
        "D": x.size(-1),
        "D_P2": width,
        "ROWS": max(1, _NORM_NUMBERS // width),
        "num_warps": 4 if width <= 2048 else 8,
    }


def sum_and_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, *, zero_centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, rounded, and its norm, both (..., D); if delta is None, x itself and its norm. With
    `zero_centred` the norm multiplies by 1 + weight (D,)."""
    return _SumNorm.apply(x, delta, weight, eps, float(zero_centred))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool = False) -> torch.Tensor:
    """Normalise (..., D) with the weight (D,), computed in float32 from the read to the write; see `sum_and_norm`."""
    return sum_and_norm(x, None, weight, eps, zero_centred=zero_centred)[1]


# SwiGLU, silu(first half) * second half, with one kernel forward and one backward: each value is read and written once.

_GATE_BLOCK, _GATE_WARPS = 1024, 4  # values of a row per program; warps


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
        _swiglu_fwd[_grid(out)](gate_up, out, out.size(-1), BLOCK=_GATE_BLOCK, num_warps=_GATE_WARPS)
        return out

    @staticmethod
    def backward(ctx, d_out):
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty_like(gate_up)
        grid = _grid(d_out)
        _swiglu_bwd[grid](
            d_out.contiguous(), gate_up, d_gate_up, d_out.size(-1), BLOCK=_GATE_BLOCK, num_warps=_GATE_WARPS
        )
        return d_gate_up


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return out.numel() // out.size(-1), triton.cdiv(out.size(-1), _GATE_BLOCK)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half: (..., 2 F) -> (..., F), in float32 from the read to the write."""
    return _Swiglu.apply(gate_up)


# Softmax and cross entropy over rows of logits, in place. n = rows, W = words of the vocabulary that this rank holds.
#
# The logits are read once forward, and read and written once backward; float32 values exist only in registers. Plain
# torch makes a float32 copy and passes over it about ten times.

_LOSS_BLOCK, _LOSS_WARPS = 4096, 8  # words per step or program; warps


# These are rows of one tensor, aligned or not depending on its length: do not compile once for each case.
@triton.jit(do_not_specialize_on_alignment=["largest", "total", "chosen"])
def _summarize_logits(logits, places, largest, total, chosen, W, BLOCK: tl.constexpr):
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
def _differentiate_logits(logits, places, largest, scale, upstream, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * W + word
    x = tl.load(at, mask=word < W, other=0.0).to(tl.float32)
    grad = tl.exp(x - tl.load(largest + row)) * tl.load(scale + row)
    grad -= tl.where(word == tl.load(places + row), tl.load(upstream + row), 0.0)
    tl.store(at, grad, mask=word < W)


def summarize_logits(logits: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out`, for each row of (n, W) logits: the largest, the sum of exp(logit - largest), the label's logit.

    Args:
        places: (n,) int64 index of the label's logit in each row; outside 0..W-1 that logit counts as 0.
        out: (3, n) float32, rows contiguous.
    """
    _summarize_logits[(len(logits),)](logits, places, *out, logits.size(1), BLOCK=_LOSS_BLOCK, num_warps=_LOSS_WARPS)


def differentiate_logits(
    logits: torch.Tensor, places: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, upstream: torch.Tensor
) -> None:
    """Overwrite (n, W) logits with their gradient, (softmax - one_hot(label)) * upstream.

    Args:
        largest, total: (n,) float32, over the words of all ranks.
        places: see `summarize_logits`.
        upstream: (n,) float32.
    """
    words = logits.size(1)
    grid = (len(logits), triton.cdiv(words, _LOSS_BLOCK))
    scale = upstream / total
    _differentiate_logits[grid](
        logits, places, largest, scale, upstream, words, BLOCK=_LOSS_BLOCK, num_warps=_LOSS_WARPS
    )


# float8 (e4m3), unpacked to bfloat16 or float32 and multiplied by one factor per row, in one pass.
#
# Per value one byte is read and two or four are written. torch takes two passes, which move 7 bytes per bfloat16 value.
# The kernel decodes the bits itself, because Triton supports the type only on Hopper and Ada.

# Rows and columns per program, and warps; narrow rows would waste a wide program.
_UNPACK_ROWS, _UNPACK_COLUMNS, _UNPACK_WARPS = 16, 256, 8


@triton.jit
def _unpack(codes, scale, out, width, rows, count, STRIDE, ROW_STRIDE, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < count)[:, None] & (column < width)
    code = tl.load(codes + row.to(tl.int64)[:, None] * width + column, mask=inside, other=0).to(tl.int32)
    magnitude = code & 127
    # The exponent's bias is 7 in e4m3 and 127 in float32; below 8 there is no leading one, and 8 is 2^-6.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value *= tl.load(scale + row, mask=row < count, other=0.0)[:, None] * tl.where(code > 127, -1.0, 1.0)
    place = (row // rows).to(tl.int64) * STRIDE + (row % rows).to(tl.int64) * ROW_STRIDE
    tl.store(out + place[:, None] + column, value.to(out.dtype.element_ty), mask=inside)


def unpack_rows(codes: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> None:
    """Unpack uint8 e4m3 codes, times the float32 factor of each row. The code of NaN is not supported.

    Args:
        codes: (matrices, rows, width), contiguous.
        scale: (matrices * rows,).
        into: (matrices, rows, width) gets the values; its rows may be apart.
    """
    matrices, rows, width = codes.shape
    count = matrices * rows
    _unpack[(triton.cdiv(count, _UNPACK_ROWS), triton.cdiv(width, _UNPACK_COLUMNS))](
        *(codes, scale, into, width, rows, count, into.stride(0), into.stride(1)),
        **{"ROWS": _UNPACK_ROWS, "COLUMNS": _UNPACK_COLUMNS, "num_warps": _UNPACK_WARPS},
    )
