"""Gated heads of which only the leading components are rotated: the kernels after the projection and after attention
(Triton, CUDA only).

A program reads a few tokens of one head, so no program holds a whole token: with 40 heads of 256 its registers would
spill. A component that is rotated also reads its partner, which the cache holds.

T = tokens, G = groups of heads, R = query heads per group, d = head dim, p = pairs of components that are rotated. Row
t of the projection holds, group by group, R queries, R gates, a key and a value: 2 R + 2 heads of d numbers.
"""

import torch
import triton
import triton.language as tl

_TOKENS = 8  # of a program's tile; 256 threads then read 16 bytes each
_SUMS = 64  # programs of each head that sum the gradients of the norms' weights
_BLOCK = 2048  # numbers of a program of the gates


@triton.jit
def _columns(cos, sin, t, inside, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """Return components, their partners, whether they are rotated, and the two factors of the rotation for tokens t."""
    column = tl.arange(0, WIDTH)[None, :]
    is_first, is_rotated = column < PAIRS, column < 2 * PAIRS
    partner = tl.where(is_first, column + PAIRS, column - PAIRS)
    angle = tl.where(is_first, column, column - PAIRS)
    c = tl.load(cos + t * PAIRS + angle, mask=inside & is_rotated, other=1.0)
    s = tl.load(sin + t * PAIRS + angle, mask=inside & is_rotated, other=0.0)
    return column, partner, is_rotated, c, tl.where(is_first, -s, s)


@triton.jit
def _weights(q_weight, k_weight, column, seen, is_key, centre):
    """Return the weights of the head's norm: (q_weight or k_weight) + centre, in float32."""
    if is_key:
        weight = tl.load(k_weight + column, mask=seen, other=0.0).to(tl.float32)
    else:
        weight = tl.load(q_weight + column, mask=seen, other=0.0).to(tl.float32)
    return weight + centre


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    mixed, cos, sin, q_weight, k_weight, q, k, v, gate, eps, centre, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 2 * R + 2
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    group, slot = tl.program_id(1) // SLOTS, tl.program_id(1) % SLOTS
    inside = t < tokens
    source = mixed + (t * G * SLOTS + tl.program_id(1)) * D
    of_group = t * G + group  # of a key or a value
    head = of_group * R + slot % R  # of a query or a gate
    column, partner, is_rotated, c, s = _columns(cos, sin, t, inside, PAIRS, WIDTH)
    seen = inside & (column < D)
    x = tl.load(source + column, mask=seen, other=0.0).to(tl.float32)
    if (slot < R) | (slot == SLOTS - 2):
        is_key = slot == SLOTS - 2
        rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        other = tl.load(source + partner, mask=inside & is_rotated, other=0.0).to(tl.float32)
        x *= rate * _weights(q_weight, k_weight, column, column < D, is_key, centre)
        other *= rate * _weights(q_weight, k_weight, partner, is_rotated, is_key, centre)
        y = x * c + other * s
        if is_key:
            tl.store(k + of_group * D + column, y, mask=seen)
        else:
            tl.store(q + head * D + column, y, mask=seen)
    elif slot == SLOTS - 1:
        tl.store(v + of_group * D + column, x, mask=seen)
    else:
        tl.store(gate + head * D + column, x, mask=seen)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    dq, dk, dv, d_gate, mixed, cos, sin, q_weight, k_weight, d_mixed, sums, eps, centre, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 2 * R + 2
    group, slot = tl.program_id(1) // SLOTS, tl.program_id(1) % SLOTS
    is_key = slot == SLOTS - 2
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        t = tl.arange(0, TOKENS).to(tl.int64)[:, None] + block * TOKENS
        inside = t < tokens
        place = (t * G * SLOTS + tl.program_id(1)) * D
        of_group = t * G + group
        head = of_group * R + slot % R
        column, partner, is_rotated, c, s = _columns(cos, sin, t, inside, PAIRS, WIDTH)
        seen = inside & (column < D)
        if (slot < R) | is_key:
            if is_key:
                g = tl.load(dk + of_group * D + column, mask=seen, other=0.0).to(tl.float32)
                other = tl.load(dk + of_group * D + partner, mask=inside & is_rotated, other=0.0).to(tl.float32)
            else:
                g = tl.load(dq + head * D + column, mask=seen, other=0.0).to(tl.float32)
                other = tl.load(dq + head * D + partner, mask=inside & is_rotated, other=0.0).to(tl.float32)
            g = g * c - other * s
            x = tl.load(mixed + place + column, mask=seen, other=0.0).to(tl.float32)
            rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x *= rate
            total += g * x
            g *= _weights(q_weight, k_weight, column, column < D, is_key, centre)
            g = rate * (g - x * (tl.sum(g * x, 1) / D)[:, None])
        elif slot == SLOTS - 1:
            g = tl.load(dv + of_group * D + column, mask=seen, other=0.0).to(tl.float32)
        else:
            g = tl.load(d_gate + head * D + column, mask=seen, other=0.0).to(tl.float32)
        tl.store(d_mixed + place + column, g, mask=seen)
    column = tl.arange(0, WIDTH)
    at = (tl.program_id(0) * G * SLOTS + tl.program_id(1)) * D + column
    tl.store(sums + at, tl.sum(total, 0), mask=column < D)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, q_weight, k_weight, numbers, heads):
        groups, per_group, head_dim = heads
        tokens = len(mixed)
        q, gate = (mixed.new_empty(tokens, groups * per_group, head_dim) for _ in range(2))
        k, v = (mixed.new_empty(tokens, groups, head_dim) for _ in range(2))
        sizes = {"G": groups, "R": per_group, "D": head_dim, "PAIRS": cos.size(1)}
        ctx.meta = {**sizes, "WIDTH": triton.next_power_of_2(head_dim), "TOKENS": _TOKENS, "num_warps": 8}
        ctx.numbers = *numbers, tokens
        grid = (triton.cdiv(tokens, _TOKENS), groups * (2 * per_group + 2))
        _forward[grid](mixed, cos, sin, q_weight, k_weight, q, k, v, gate, *ctx.numbers, **ctx.meta)
        ctx.save_for_backward(mixed, cos, sin, q_weight, k_weight)
        return q, k, v, gate

    @staticmethod
    def backward(ctx, *grads):
        mixed, cos, sin, q_weight, k_weight = ctx.saved_tensors
        groups, per_group, head_dim = (ctx.meta[name] for name in ("G", "R", "D"))
        d_mixed, slots = torch.empty_like(mixed), 2 * per_group + 2
        programs = min(_SUMS, triton.cdiv(len(mixed), _TOKENS))
        sums = cos.new_empty(programs, groups, slots, head_dim)
        _backward[programs, groups * slots](
            *(x.contiguous() for x in grads),
            *(mixed, cos, sin, q_weight, k_weight, d_mixed, sums, *ctx.numbers),
            **ctx.meta,
        )
        of_queries, of_keys = sums[:, :, :per_group].sum((0, 1, 2)), sums[:, :, -2].sum((0, 1))
        d_weights = of_queries.to(q_weight.dtype), of_keys.to(k_weight.dtype)
        return d_mixed, None, None, *d_weights, None, None


def split_gated_heads(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    *,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the heads, and normalise and rotate queries and keys, in float32 from the read to the write.

    Only the sizes of the heads are constants of the kernels, so new lengths need no compilation.

    Args:
        mixed: (T, G * (2 R + 2) * d), contiguous.
        cos: (T, p) float32; angle i rotates components i and p + i, and components from 2 p on are not rotated.
        sin: (T, p) float32.
        heads: G, R and d.
        norms: (d,) weights of the RMS norms of queries and of keys.
        zero_centred: the weights are centred at zero, and count one more.

    Returns:
        Queries (T, G * R, d), keys and values (T, G, d), and gates (T, G * R, d).
    """
    return _SplitNormRotate.apply(mixed, cos, sin, *norms, (eps, float(zero_centred)), heads)


@triton.jit
def _open_forward(x, gate, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * opened, mask=inside)


@triton.jit
def _open_backward(grad, x, gate, d_x, d_gate, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    passed = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * opened
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_x + at, passed, mask=inside)
    tl.store(d_gate + at, passed * value * (1.0 - opened), mask=inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, places):
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate)
        out, ctx.d_gate = places
        out = torch.empty_like(x) if out is None else out
        _open_forward[(triton.cdiv(x.numel(), _BLOCK),)](x, gate, out, x.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), torch.empty_like(gate) if ctx.d_gate is None else ctx.d_gate
        grid = (triton.cdiv(x.numel(), _BLOCK),)
        _open_backward[grid](grad.contiguous(), x, gate, d_x, d_gate, x.numel(), BLOCK=_BLOCK)
        return d_x, d_gate, None


def gated(
    x: torch.Tensor, gate: torch.Tensor, places: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
) -> torch.Tensor:
    """Return x * sigmoid(gate) in x's dtype and shape, computed in float32.

    Args:
        gate: as many numbers as `x`, in the same order.
        places: memory for the output and for the gate's gradient, in the shapes of `x` and `gate`; None for new memory.
    """
    return _Gated.apply(x, gate, places)
