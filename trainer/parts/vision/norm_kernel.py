"""A sum and its layer norm in one kernel, with one kernel for both gradients (Triton, CUDA only).

The sum of a layer's input and its half's output is read by the next norm. One by one, sum and norm read and write five
times, and in backward the sums of the biases' gradients are passes of their own.

N = rows, D = values of a row.
"""

import torch
import triton
import triton.language as tl

from trainer.layers.kernels import row_blocks

_PROGRAMS = 132 * 4  # programs of the backward pass; each sums the gradients of the vectors over its rows


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x + delta + delta_bias and its layer norm, computed in float32; the sum is rounded before the norm.

    Args:
        x, delta: (N, D), contiguous. If delta is None, there is no sum, and x itself is returned.
        delta_bias, weight, bias: (D,).

    Returns:
        The sum (N, D), its norm (N, D), and (2, N) float32 means and inverse standard deviations.
    """
    out = x if delta is None else torch.empty_like(x)
    normed, statistics = torch.empty_like(x), x.new_empty(2, len(x), dtype=torch.float32)
    shape = row_blocks(x)
    _add_norm_fwd[(triton.cdiv(len(x), shape["ROWS"]),)](
        *(x, delta, delta_bias, weight, bias, out, normed, statistics, len(x), eps), ADD=delta is not None, **shape
    )
    return out, normed, statistics


def add_norm_gradients(
    d_out: torch.Tensor,
    d_normed: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of x, which is also that of delta, the norm again, and the gradients of the vectors.

    Args:
        d_out, d_normed: (N, D) gradients of the sum and of its norm, contiguous.
        out, statistics: results of `add_norm`.

    Returns:
        (N, D), (N, D), and (3, D) float32: the gradients of the norm's weight, of its bias, and of delta_bias.
    """
    shape, d_x, normed = row_blocks(out), torch.empty_like(out), torch.empty_like(out)
    programs = min(_PROGRAMS, triton.cdiv(len(out), shape["ROWS"]))
    sums = out.new_empty(programs, 3, out.size(1), dtype=torch.float32)
    _add_norm_bwd[(programs,)](*(d_out, d_normed, out, statistics, weight, bias, d_x, normed, sums, len(out)), **shape)
    return d_x, normed, sums.sum(0)


@triton.jit
def _add_norm_fwd(
    x, delta, delta_bias, weight, bias, out, normed, statistics, rows, eps,
    ADD: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_P2)[None, :]
    inside = (row < rows)[:, None] & (column < D)
    at = row[:, None] * D + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(delta_bias + column, mask=column < D, other=0.0).to(tl.float32)
        # The norm is that of the rounded sum, which later operations read.
        rounded = value.to(out.dtype.element_ty)
        tl.store(out + at, rounded, mask=inside)
        value = tl.where(inside, rounded.to(tl.float32), 0.0)
    mean = tl.sum(value, 1) / D
    centred = tl.where(inside, value - mean[:, None], 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(normed + at, (centred * rate[:, None] * w + b).to(normed.dtype.element_ty), mask=inside)
    tl.store(statistics + row, mean, mask=row < rows)
    tl.store(statistics + rows + row, rate, mask=row < rows)


@triton.jit
def _add_norm_bwd(
    d_out, d_normed, out, statistics, weight, bias, d_x, normed, sums, rows,
    D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D_P2)[None, :]
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, D_P2), tl.float32)
    of_bias = tl.zeros((ROWS, D_P2), tl.float32)
    of_x = tl.zeros((ROWS, D_P2), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + block * ROWS
        inside = (row < rows)[:, None] & (column < D)
        at = row[:, None] * D + column
        dy = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        # The gradient of the sum itself, to which the next half adds again.
        upstream = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
        rate = tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None]
        value = tl.where(inside, (value - mean) * rate, 0.0)
        tl.store(normed + at, (value * w + b).to(normed.dtype.element_ty), mask=inside)
        of_weight += dy * value
        of_bias += dy
        dy *= w
        along = tl.sum(dy * value, 1)[:, None] / D
        dx = rate * (dy - value * along - tl.sum(dy, 1)[:, None] / D) + upstream
        of_x += tl.where(inside, dx, 0.0)
        tl.store(d_x + at, dx.to(d_x.dtype.element_ty), mask=inside)
    place = tl.arange(0, D_P2)
    sums += tl.program_id(0) * 3 * D + place
    tl.store(sums, tl.sum(of_weight, 0), mask=place < D)
    tl.store(sums + D, tl.sum(of_bias, 0), mask=place < D)
    tl.store(sums + 2 * D, tl.sum(of_x, 0), mask=place < D)
