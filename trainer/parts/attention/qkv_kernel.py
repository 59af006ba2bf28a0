"""Split the mixed projection into queries, keys and values, normalise and rotate, in one kernel (Triton, CUDA only).

Plain torch moves the values through memory six times forward and seven times backward.

T = tokens or patches, G = groups of heads, R = query heads per group, d = head dim.
"""

import torch
import triton
import triton.language as tl

# Programs of the backward pass with norms; each sums the gradient of the norms' weights over its tokens.
_PROGRAMS = 132 * 8


@triton.jit
def _tile(R: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROWS_P2: tl.constexpr, HALF_P2: tl.constexpr):
    """Return offsets and masks of one token's heads. A row is a head, group by group: R queries, a key, a value."""
    row = tl.arange(0, ROWS_P2)[:, None]
    col = tl.arange(0, HALF_P2)[None, :]
    group, slot = row // (R + 2), row % (R + 2)
    inside = (row < ROWS) & (col < D // 2)
    is_q, is_k, is_v = inside & (slot < R), inside & (slot == R), inside & (slot == R + 1)
    at_q = (group * R + slot) * D + col
    at_kv = group * D + col
    return row * D + col, col, inside, is_q, is_k, is_v, at_q, at_kv


@triton.jit
def _split_forward(
    mixed, cos, sin, q_weight, k_weight, q, k, v, eps,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROWS_P2: tl.constexpr, HALF_P2: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    at, col, inside, is_q, is_k, is_v, at_q, at_kv = _tile(R, G * (R + 2), D, ROWS_P2, HALF_P2)
    mixed += t * G * (R + 2) * D
    q += t * G * R * D
    k += t * G * D
    v += t * G * D
    x1 = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(mixed + at + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + t * HALF + col, mask=col < HALF, other=0.0)
    s = tl.load(sin + t * HALF + col, mask=col < HALF, other=0.0)
    n1, n2 = x1, x2
    if NORM:
        rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = tl.where(is_q, tl.load(q_weight + col, mask=col < HALF), tl.load(k_weight + col, mask=col < HALF))
        w2 = tl.where(
            is_q, tl.load(q_weight + HALF + col, mask=col < HALF), tl.load(k_weight + HALF + col, mask=col < HALF)
        )
        n1, n2 = x1 * rstd * w1.to(tl.float32), x2 * rstd * w2.to(tl.float32)
    y1, y2 = n1 * c - n2 * s, n2 * c + n1 * s
    tl.store(q + at_q, y1, mask=is_q)
    tl.store(q + at_q + HALF, y2, mask=is_q)
    tl.store(k + at_kv, y1, mask=is_k)
    tl.store(k + at_kv + HALF, y2, mask=is_k)
    tl.store(v + at_kv, x1, mask=is_v)
    tl.store(v + at_kv + HALF, x2, mask=is_v)


@triton.jit(do_not_specialize=["tokens"])
def _split_backward(
    dq, dk, dv, mixed, cos, sin, q_weight, k_weight, d_mixed, d_weights, eps, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROWS_P2: tl.constexpr, HALF_P2: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    WIDTH: tl.constexpr = G * (R + 2) * D
    at, col, inside, is_q, is_k, is_v, at_q, at_kv = _tile(R, G * (R + 2), D, ROWS_P2, HALF_P2)
    if NORM:
        w1 = tl.where(is_q, tl.load(q_weight + col, mask=col < HALF), tl.load(k_weight + col, mask=col < HALF))
        w2 = tl.where(
            is_q, tl.load(q_weight + HALF + col, mask=col < HALF), tl.load(k_weight + HALF + col, mask=col < HALF)
        )
        w1, w2 = w1.to(tl.float32), w2.to(tl.float32)
        sum1 = tl.zeros((ROWS_P2, HALF_P2), tl.float32)
        sum2 = tl.zeros((ROWS_P2, HALF_P2), tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        t = token.to(tl.int64)
        q_at, kv_at = t * G * R * D + at_q, t * G * D + at_kv
        g1 = tl.load(dq + q_at, mask=is_q, other=0.0).to(tl.float32)
        g1 += tl.load(dk + kv_at, mask=is_k, other=0.0).to(tl.float32)
        g2 = tl.load(dq + q_at + HALF, mask=is_q, other=0.0).to(tl.float32)
        g2 += tl.load(dk + kv_at + HALF, mask=is_k, other=0.0).to(tl.float32)
        v1 = tl.load(dv + kv_at, mask=is_v, other=0.0).to(tl.float32)
        v2 = tl.load(dv + kv_at + HALF, mask=is_v, other=0.0).to(tl.float32)
        c = tl.load(cos + t * HALF + col, mask=col < HALF, other=0.0)
        s = tl.load(sin + t * HALF + col, mask=col < HALF, other=0.0)
        n1, n2 = g1 * c + g2 * s, g2 * c - g1 * s
        if NORM:
            x1 = tl.load(mixed + t * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(mixed + t * WIDTH + at + HALF, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            x1 *= rstd
            x2 *= rstd
            sum1 += n1 * x1
            sum2 += n2 * x2
            n1 *= w1
            n2 *= w2
            mean = ((tl.sum(n1 * x1, 1) + tl.sum(n2 * x2, 1)) / D)[:, None]
            n1, n2 = rstd * (n1 - x1 * mean), rstd * (n2 - x2 * mean)
        tl.store(d_mixed + t * WIDTH + at, tl.where(is_v, v1, n1), mask=inside)
        tl.store(d_mixed + t * WIDTH + at + HALF, tl.where(is_v, v2, n2), mask=inside)
    if NORM:
        place = d_weights + tl.program_id(0) * 2 * D + tl.arange(0, HALF_P2)
        seen = tl.arange(0, HALF_P2) < HALF
        tl.store(place, tl.sum(tl.where(is_q, sum1, 0.0), 0), mask=seen)
        tl.store(place + HALF, tl.sum(tl.where(is_q, sum2, 0.0), 0), mask=seen)
        tl.store(place + D, tl.sum(tl.where(is_k, sum1, 0.0), 0), mask=seen)
        tl.store(place + D + HALF, tl.sum(tl.where(is_k, sum2, 0.0), 0), mask=seen)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, q_weight, k_weight, eps, heads):
        groups, head_dim = heads
        tokens, width = mixed.shape
        per_group = width // (groups * head_dim) - 2
        ctx.meta = {
            "G": groups,
            "R": per_group,
            "D": head_dim,
            "ROWS_P2": triton.next_power_of_2(groups * (per_group + 2)),
            "HALF_P2": triton.next_power_of_2(head_dim // 2),
            "NORM": q_weight is not None,
        }
        ctx.eps = eps
        q = mixed.new_empty(tokens, groups * per_group, head_dim)
        k, v = (mixed.new_empty(tokens, groups, head_dim) for _ in range(2))
        _split_forward[(tokens,)](mixed, cos, sin, q_weight, k_weight, q, k, v, eps, **ctx.meta)
        ctx.save_for_backward(cos, sin, *((mixed, q_weight, k_weight) if q_weight is not None else ()))
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        cos, sin, *norm = ctx.saved_tensors
        mixed, q_weight, k_weight = norm or (None, None, None)
        tokens, meta = len(dq), ctx.meta
        d_mixed = dq.new_empty(tokens, meta["G"] * (meta["R"] + 2) * meta["D"])
        programs = min(tokens, _PROGRAMS) if norm else tokens
        sums = dq.new_empty(programs, 2, meta["D"], dtype=torch.float32) if norm else None
        grads = [x.contiguous() for x in (dq, dk, dv)]
        _split_backward[(programs,)](
            *grads, mixed, cos, sin, q_weight, k_weight, d_mixed, sums, ctx.eps, tokens, **meta
        )
        d_weights = sums.sum(0).to(q_weight.dtype) if norm else (None, None)
        return d_mixed, None, None, d_weights[0], d_weights[1], None, None


def split_norm_rotate(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the heads, normalise queries and keys if they have weights, and rotate them.

    All is computed in float32 from the read to the write. Only the sizes of the heads are constants of the kernel, so
    new lengths need no compilation.

    Args:
        mixed: (T, G * (R + 2) * d), group by group R queries, a key, a value.
        cos: (T, d / 2) float32; each angle rotates a pair with one component from each half.
        sin: (T, d / 2) float32.
        q_weight, k_weight: (d,) weights of the norms; None for no norm.

    Returns:
        Queries (T, G * R, d), keys (T, G, d) and values (T, G, d).
    """
    return _SplitNormRotate.apply(mixed, cos, sin, q_weight, k_weight, eps, (groups, head_dim))
