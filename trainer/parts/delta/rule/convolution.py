"""Short causal convolution, silu, split into heads, queries and keys at unit length (Triton).

One kernel runs forward and one backward; plain torch takes nine passes over memory forward. The convolution has 4 taps,
and the last tap is for the token itself. No tap crosses the start of a segment: the token at position p of its segment
has taps for the min(p, 3) tokens before it.
"""

import torch
import triton
import triton.language as tl

from trainer.data.packed_chunks import PackedChunks
from trainer.parts.delta.rule.plain import L2_EPS

TAPS = 4
# Launch settings. A program takes one head and ROWS tokens forward, HEADS heads and RUN tokens backward; maxnreg bounds
# the registers of a thread. RUN also sets the memory of the taps' gradients, one sum for each run.
FORWARD = {"ROWS": 16, "num_warps": 2}
BACKWARD = {"RUN": 128, "HEADS": 2, "num_warps": 2, "maxnreg": 168}


def convolve_heads(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    chunks: PackedChunks,
    heads: tuple[int, int, int],
    place: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolve, apply silu, split into heads and normalise queries and keys, in float32 from the read to the write.

    Args:
        mixed: (T, [q | k | v]); rows may be slices of wider rows.
        weight: (channels, 4).
        heads: HK, H and D.
        place: memory for the gradient of `mixed`, laid out like it; None for new memory.

    Returns:
        q and k (T, HK, H / HK, D) of unit length, q times D ** -0.5, and v (T, H, D). The value heads of a key head
        share its memory; their gradients are summed while they are read.
    """
    return _Convolution.apply(mixed, weight, chunks, heads, place)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, weight, chunks: PackedChunks, heads: tuple[int, int, int], place):
        key_heads, value_heads, dim = heads
        tokens = len(mixed)
        q, k = (mixed.new_empty(tokens, key_heads, dim) for _ in range(2))
        v = mixed.new_empty(tokens, value_heads, dim)
        ctx.meta = {"HK": key_heads, "H": value_heads, "D": dim}
        ctx.chunks, ctx.place = chunks, place
        grid = (2 * key_heads + value_heads, triton.cdiv(tokens, FORWARD["ROWS"]))
        _convolve_forward[grid](
            *(mixed, weight, chunks.positions, q, k, v, tokens, mixed.stride(0), dim**-0.5, L2_EPS),
            **ctx.meta,
            **FORWARD,
        )
        ctx.save_for_backward(mixed, weight)
        q, k = (x.unsqueeze(2).expand(-1, -1, value_heads // key_heads, -1) for x in (q, k))
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        mixed, weight = ctx.saved_tensors
        key_heads, value_heads, dim = ctx.meta.values()
        tokens, channels = len(mixed), weight.shape[0]
        launch = BACKWARD | {"HEADS": _common(BACKWARD["HEADS"], key_heads, value_heads)}
        d_mixed = mixed.new_empty(tokens, channels) if ctx.place is None else ctx.place
        runs = triton.cdiv(tokens, launch["RUN"])
        sums = mixed.new_empty(runs, *weight.shape, dtype=torch.float32)
        grads = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        grid = ((2 * key_heads + value_heads) // launch["HEADS"], runs)
        _convolve_backward[grid](
            *(mixed, weight, ctx.chunks.positions, *grads, d_mixed, sums, tokens),
            *(mixed.stride(0), d_mixed.stride(0), dim**-0.5, L2_EPS),
            **ctx.meta,
            **launch,
        )
        return d_mixed, sums.sum(0).to(weight.dtype), None, None, None


def _common(most: int, key_heads: int, value_heads: int) -> int:
    """Return the largest power of two up to `most` that divides both numbers of heads."""
    while key_heads % most or value_heads % most:
        most //= 2
    return most


@triton.jit
def _convolve_forward(
    mixed, weight, positions, q, k, v, tokens, stride, scale, eps,
    HK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write q, k and v of the forward pass; each program computes one head and ROWS tokens."""
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    inside = row < tokens
    position = tl.load(positions + row, mask=inside, other=0)
    channel = head * D + dim
    at = mixed + row.to(tl.int64)[:, None] * stride + channel[None, :]
    total = tl.zeros((ROWS, D), tl.float32)
    for back in tl.static_range(4):
        tap = tl.load(weight + channel * 4 + 3 - back).to(tl.float32)
        x = tl.load(at - back * stride, mask=(inside & (position >= back))[:, None], other=0.0)
        total += x.to(tl.float32) * tap[None, :]
    y = total * tl.sigmoid(total)
    token = row.to(tl.int64)[:, None]
    if head < 2 * HK:
        unit = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        if head < HK:
            tl.store(q + token * (HK * D) + channel[None, :], (unit * scale).to(q.dtype.element_ty), inside[:, None])
        else:
            tl.store(k + token * (HK * D) + (channel - HK * D)[None, :], unit.to(q.dtype.element_ty), inside[:, None])
    else:
        tl.store(v + token * (H * D) + (channel - 2 * HK * D)[None, :], y.to(q.dtype.element_ty), inside[:, None])


@triton.jit
def _load_row(base, token, tokens, stride, channel):
    """Return a token's channels, or zeros if the bin has no such token."""
    # `channel >= 0` is always true: it gives the mask the shape of the channels.
    inside = (token >= 0) & (token < tokens) & (channel >= 0)
    return tl.load(base + token * stride + channel, mask=inside, other=0.0)


@triton.jit
def _load_sum(base, token, tokens, stride, channel, SHARED: tl.constexpr, D: tl.constexpr):
    """Return the sum of a token's rows of SHARED heads, the first of which has these channels."""
    total = _load_row(base, token, tokens, stride, channel).to(tl.float32)
    for other in tl.static_range(1, SHARED):
        total += _load_row(base + other * D, token, tokens, stride, channel).to(tl.float32)
    return total


@triton.jit
def _load_taps(weight, channel):
    at = weight + channel * 4
    w0, w1 = tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)
    return w0, w1, tl.load(at + 2).to(tl.float32), tl.load(at + 3).to(tl.float32)


@triton.jit
def _store_taps(at, s0, s1, s2, s3):
    tl.store(at, s0)
    tl.store(at + 1, s1)
    tl.store(at + 2, s2)
    tl.store(at + 3, s3)


@triton.jit
def _load_positions(positions, t, tokens):
    """Return the positions of four tokens, last token first."""
    p0 = tl.load(positions + t, mask=t < tokens, other=0)
    p1 = tl.load(positions + t - 1, mask=t - 1 < tokens, other=0)
    p2 = tl.load(positions + t - 2, mask=t - 2 < tokens, other=0)
    return p0, p1, p2, tl.load(positions + t - 3, mask=t - 3 < tokens, other=0)


@triton.jit
def _backward_step(
    x3, x2, x1, x0, dy, position, own, w3, w2, w1, w0, for_1, for_2, for_3, sum3, sum2, sum1, sum0, factor, eps,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Process one token: complete its gradient, to which the three tokens after it have already contributed, and add
    its contributions to the gradients of the three before it. `own`: whether the token is in this program's run, so
    that it counts in the taps' gradients."""
    dy *= factor
    x2, w2 = tl.where(position >= 1, x2, 0.0), tl.where(position >= 1, w2, 0.0)
    x1, w1 = tl.where(position >= 2, x1, 0.0), tl.where(position >= 2, w1, 0.0)
    x0, w0 = tl.where(position >= 3, x0, 0.0), tl.where(position >= 3, w0, 0.0)
    pre = x3 * w3 + x2 * w2 + x1 * w1 + x0 * w0
    gate = tl.sigmoid(pre)
    y = pre * gate
    if NORMED:
        rate = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        dy = rate * (dy - y * (rate * rate * tl.sum(dy * y, 1)[:, None]))
    d_pre = dy * (gate + y * (1.0 - gate))
    dx = for_1 + w3 * d_pre
    for_1 = for_2 + w2 * d_pre
    for_2 = for_3 + w1 * d_pre
    for_3 = w0 * d_pre
    d_pre = tl.where(own, d_pre, 0.0)
    sum3 += d_pre * x3
    sum2 += d_pre * x2
    sum1 += d_pre * x1
    sum0 += d_pre * x0
    return dx, for_1, for_2, for_3, sum3, sum2, sum1, sum0


@triton.jit
def _run_backward(
    mixed, weight, positions, grad, d_mixed, sums, first, first_of_grad, tokens, stride, stride_dx, factor, eps,
    WIDTH: tl.constexpr, OF_GRAD: tl.constexpr, D: tl.constexpr, RUN: tl.constexpr, HEADS: tl.constexpr,
    SHARED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of HEADS heads and RUN tokens.

    Args:
        first, first_of_grad: the first of these heads, in `mixed` and in `grad`.
        WIDTH, OF_GRAD: numbers of a token in `mixed` and in `grad`.
        SHARED: heads of `grad` for each head.
        NORMED: whether the heads' forward pass brought them to unit length.
    """
    begin = tl.program_id(1).to(tl.int64) * RUN
    end = begin + RUN
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, D)[None, :]
    channel, source = (first + head) * D + dim, (first_of_grad + head) * (SHARED * D) + dim
    w0, w1, w2, w3 = _load_taps(weight, channel)
    # Names of variables, as an array of tensors cannot be indexed in a kernel: x3 to x0 are the newest token and the
    # three before it.
    zero = tl.zeros((HEADS, D), tl.float32)
    a1, a2, a3 = zero, zero, zero  # partial gradients of the tokens one, two and three before
    s3, s2, s1, s0 = zero, zero, zero, zero
    top = end + 3
    x3 = _load_row(mixed, top, tokens, stride, channel).to(tl.float32)
    x2 = _load_row(mixed, top - 1, tokens, stride, channel).to(tl.float32)
    x1 = _load_row(mixed, top - 2, tokens, stride, channel).to(tl.float32)
    for step in range(0, RUN + 4, 4):
        t = top - step
        # All reads of four tokens come before the first write: several reads in flight take no longer than one, a
        # microsecond.
        x0 = _load_row(mixed, t - 3, tokens, stride, channel)
        y0 = _load_row(mixed, t - 4, tokens, stride, channel)
        z0 = _load_row(mixed, t - 5, tokens, stride, channel)
        u0 = _load_row(mixed, t - 6, tokens, stride, channel)
        g0 = _load_sum(grad, t, tokens, OF_GRAD, source, SHARED, D)
        g1 = _load_sum(grad, t - 1, tokens, OF_GRAD, source, SHARED, D)
        g2 = _load_sum(grad, t - 2, tokens, OF_GRAD, source, SHARED, D)
        g3 = _load_sum(grad, t - 3, tokens, OF_GRAD, source, SHARED, D)
        p0, p1, p2, p3 = _load_positions(positions, t, tokens)
        x0, y0, z0, u0 = x0.to(tl.float32), y0.to(tl.float32), z0.to(tl.float32), u0.to(tl.float32)
        d0, a1, a2, a3, s3, s2, s1, s0 = _backward_step(
            x3, x2, x1, x0, g0, p0, t < end, w3, w2, w1, w0, a1, a2, a3, s3, s2, s1, s0, factor, eps, NORMED
        )
        d1, a1, a2, a3, s3, s2, s1, s0 = _backward_step(
            x2, x1, x0, y0, g1, p1, t - 1 < end, w3, w2, w1, w0, a1, a2, a3, s3, s2, s1, s0, factor, eps, NORMED
        )
        d2, a1, a2, a3, s3, s2, s1, s0 = _backward_step(
            x1, x0, y0, z0, g2, p2, t - 2 < end, w3, w2, w1, w0, a1, a2, a3, s3, s2, s1, s0, factor, eps, NORMED
        )
        d3, a1, a2, a3, s3, s2, s1, s0 = _backward_step(
            x0, y0, z0, u0, g3, p3, t - 3 < end, w3, w2, w1, w0, a1, a2, a3, s3, s2, s1, s0, factor, eps, NORMED
        )
        at = d_mixed + t * stride_dx + channel
        mine = (t < end) & (channel >= 0)  # the first four tokens are after the run and not its own
        tl.store(at, d0.to(d_mixed.dtype.element_ty), mask=mine & (t < tokens))
        tl.store(at - stride_dx, d1.to(d_mixed.dtype.element_ty), mask=mine & (t - 1 < tokens))
        tl.store(at - 2 * stride_dx, d2.to(d_mixed.dtype.element_ty), mask=mine & (t - 2 < tokens))
        tl.store(at - 3 * stride_dx, d3.to(d_mixed.dtype.element_ty), mask=mine & (t - 3 < tokens))
        x3, x2, x1 = y0, z0, u0
    place = sums + tl.program_id(1).to(tl.int64) * 4 * WIDTH + channel * 4
    _store_taps(place, s0, s1, s2, s3)


@triton.jit
def _convolve_backward(
    mixed, weight, positions, dq, dk, dv, d_mixed, sums, tokens, stride, stride_dx, scale, eps,
    HK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, RUN: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of HEADS heads and RUN tokens per program, last token first, so that each value is read once:
    a token's contributions to the gradients of the three tokens before it stay in registers. The tokens just after the
    run are read for their contributions to it; another program writes their gradients."""
    WIDTH: tl.constexpr = (2 * HK + H) * D
    head = tl.program_id(0) * HEADS
    # Code of their own for queries, keys and values: where it is not known at compile time what is read, it is read
    # number by number.
    if head < HK:
        _run_backward(
            mixed, weight, positions, dq, d_mixed, sums, head, head, tokens, stride, stride_dx, scale, eps,
            WIDTH, H * D, D, RUN, HEADS, H // HK, True,
        )  # fmt: skip
    elif head < 2 * HK:
        _run_backward(
            mixed, weight, positions, dk, d_mixed, sums, head, head - HK, tokens, stride, stride_dx, 1.0, eps,
            WIDTH, H * D, D, RUN, HEADS, H // HK, True,
        )  # fmt: skip
    else:
        _run_backward(
            mixed, weight, positions, dv, d_mixed, sums, head, head - 2 * HK, tokens, stride, stride_dx, 1.0, eps,
            WIDTH, H * D, D, RUN, HEADS, 1, False,
        )  # fmt: skip
