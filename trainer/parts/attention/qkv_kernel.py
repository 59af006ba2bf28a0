"""Split the mixed projection into queries, keys and values, normalise and rotate, in one kernel (Triton, CUDA only).

Plain torch moves the values through memory six times forward and seven times backward.

T = tokens or patches, G = groups of heads, R = query heads per group, d = head dim, E = d or more: the width of a head
in the results, whose further components are zero. An attention core that takes no heads of d reads them without a copy.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Programs of the backward pass if it sums gradients of vectors, eight for each multiprocessor of an H100 or H200; each
# sums those of its tokens.
_PROGRAMS = 132 * 8


class Heads(NamedTuple):
    """The heads of an attention: their groups, query heads of a group, head dim d, and width E in the results."""

    groups: int
    per_group: int
    head_dim: int
    width: int


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
    """Split the heads, normalise queries and keys if they have weights, and rotate them, in float32 from the read to
    the write.

    Args:
        mixed: (T, G * (R + 2) * d), group by group R queries, a key, a value.
        cos: (T, d / 2) float32; each angle rotates a pair with one component from each half.
        sin: (T, d / 2) float32.
        q_weight, k_weight: (d,) weights of the norms; None for no norm.

    Returns:
        Queries (T, G * R, d), keys (T, G, d) and values (T, G, d).
    """
    heads = Heads(groups, mixed.size(1) // (groups * head_dim) - 2, head_dim, head_dim)
    return _SplitNormRotate.apply(mixed, cos, sin, q_weight, k_weight, eps, heads)


def split_forward(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: Heads,
    norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries (T, G * R, E), keys and values (T, G, E), without autograd; see `split_norm_rotate`."""
    tokens, rest = len(mixed), triton.next_power_of_2(max(1, heads.width - heads.head_dim))
    q = mixed.new_empty(tokens, heads.groups * heads.per_group, heads.width)
    k, v = (mixed.new_empty(tokens, heads.groups, heads.width) for _ in range(2))
    _split_forward[(tokens,)](
        mixed, cos, sin, *norms, q, k, v, eps, **_sizes(*heads), REST_P2=rest, NORM=norms[0] is not None
    )
    return q, k, v


def split_gradients(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of `mixed` (T, G * (R + 2) * d) and its sum over the tokens, in float32, given those of the
    results of `split_forward`; no norms."""
    tokens, width = len(cos), heads.groups * (heads.per_group + 2) * heads.head_dim
    programs = min(tokens, _PROGRAMS)
    d_mixed, sums = grads[0].new_empty(tokens, width), cos.new_empty(programs, width)
    _split_backward[(programs,)](
        *(*(x.contiguous() for x in grads), None, cos, sin, None, None, d_mixed, None, sums, 0.0, tokens),
        **_sizes(*heads),
        NORM=False,
        SUM=True,
    )
    return d_mixed, sums.sum(0)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, q_weight, k_weight, eps, heads):
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(cos, sin, *((mixed, q_weight, k_weight) if q_weight is not None else ()))
        return split_forward(mixed, cos, sin, heads, (q_weight, k_weight), eps)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin, *norm = ctx.saved_tensors
        meta = {**_sizes(*ctx.heads), "NORM": bool(norm), "SUM": False}
        mixed, q_weight, k_weight = norm or (None, None, None)
        tokens = len(cos)
        d_mixed = cos.new_empty(tokens, meta["G"] * (meta["R"] + 2) * meta["D"], dtype=grads[0].dtype)
        programs = min(tokens, _PROGRAMS) if norm else tokens
        sums = cos.new_empty(programs, 2, meta["D"]) if norm else None
        grads = [x.contiguous() for x in grads]
        _split_backward[(programs,)](
            *grads, mixed, cos, sin, q_weight, k_weight, d_mixed, sums, None, ctx.eps, tokens, **meta
        )
        d_weights = sums.sum(0).to(q_weight.dtype) if norm else (None, None)
        return d_mixed, None, None, d_weights[0], d_weights[1], None, None


def _sizes(groups: int, per_group: int, head_dim: int, width: int) -> dict[str, int]:
    # Only the sizes of the heads are constants of the kernels, so new lengths need no compilation.
    return {
        "G": groups,
        "R": per_group,
        "D": head_dim,
        "E": width,
        "ROWS_P2": triton.next_power_of_2(groups * (per_group + 2)),
        "HALF_P2": triton.next_power_of_2(head_dim // 2),
    }


@triton.jit
def _tile(
    R: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS_P2: tl.constexpr, HALF_P2: tl.constexpr
):
    """Return offsets and masks of one token's heads. A row is a head, group by group: R queries, a key, a value."""
    # Columns cover half a head: a rotation takes one component of each half, and both are in the same program.
    row = tl.arange(0, ROWS_P2)[:, None]
    col = tl.arange(0, HALF_P2)[None, :]
    group, slot = row // (R + 2), row % (R + 2)
    inside = (row < ROWS) & (col < D // 2)
    is_q, is_k, is_v = inside & (slot < R), inside & (slot == R), inside & (slot == R + 1)
    at_q = (group * R + slot) * E + col
    at_kv = group * E + col
    return row * D + col, col, inside, is_q, is_k, is_v, at_q, at_kv


@triton.jit
def _split_forward(
    mixed, cos, sin, q_weight, k_weight, q, k, v, eps,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS_P2: tl.constexpr, HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    at, col, inside, is_q, is_k, is_v, at_q, at_kv = _tile(R, G * (R + 2), D, E, ROWS_P2, HALF_P2)
    mixed += t * G * (R + 2) * D
    q += t * G * R * E
    k += t * G * E
    v += t * G * E
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
    if E > D:  # zeros behind each head
        head = tl.arange(0, ROWS_P2)[:, None]
        rest = D + tl.arange(0, REST_P2)[None, :]
        zero = tl.zeros((ROWS_P2, REST_P2), tl.float32)
        tl.store(q + head * E + rest, zero, mask=(head < G * R) & (rest < E))
        tl.store(k + head * E + rest, zero, mask=(head < G) & (rest < E))
        tl.store(v + head * E + rest, zero, mask=(head < G) & (rest < E))


@triton.jit(do_not_specialize=["tokens"])
def _split_backward(
    dq, dk, dv, mixed, cos, sin, q_weight, k_weight, d_mixed, d_weights, d_bias, eps, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS_P2: tl.constexpr, HALF_P2: tl.constexpr,
    NORM: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    WIDTH: tl.constexpr = G * (R + 2) * D
    at, col, inside, is_q, is_k, is_v, at_q, at_kv = _tile(R, G * (R + 2), D, E, ROWS_P2, HALF_P2)
    if SUM:
        total1 = tl.zeros((ROWS_P2, HALF_P2), tl.float32)
        total2 = tl.zeros((ROWS_P2, HALF_P2), tl.float32)
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
        q_at, kv_at = t * G * R * E + at_q, t * G * E + at_kv
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
        # Values are neither normalised nor rotated.
        n1, n2 = tl.where(is_v, v1, n1), tl.where(is_v, v2, n2)
        if SUM:
            total1 += n1
            total2 += n2
        tl.store(d_mixed + t * WIDTH + at, n1, mask=inside)
        tl.store(d_mixed + t * WIDTH + at + HALF, n2, mask=inside)
    if SUM:
        tl.store(d_bias + tl.program_id(0) * WIDTH + at, total1, mask=inside)
        tl.store(d_bias + tl.program_id(0) * WIDTH + at + HALF, total2, mask=inside)
    if NORM:
        place = d_weights + tl.program_id(0) * 2 * D + tl.arange(0, HALF_P2)
        seen = tl.arange(0, HALF_P2) < HALF
        tl.store(place, tl.sum(tl.where(is_q, sum1, 0.0), 0), mask=seen)
        tl.store(place + HALF, tl.sum(tl.where(is_q, sum2, 0.0), 0), mask=seen)
        tl.store(place + D, tl.sum(tl.where(is_k, sum1, 0.0), 0), mask=seen)
        tl.store(place + D + HALF, tl.sum(tl.where(is_k, sum2, 0.0), 0), mask=seen)
