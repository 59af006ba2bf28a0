"""Gated heads of which only the leading components are rotated: the kernels after the projection and after attention
(Triton, CUDA only).

A program reads a few tokens of one head, so no program holds a whole token: with 40 heads of 256 its registers would
spill. Of a query or a key it reads the rotated components a second time, as pairs, which the cache holds: partners
that were looked up one by one would be read number by number.

T = tokens, G = groups of heads, R = query heads per group, d = head dim, p = pairs of components that are rotated. Row
t of the projection holds, group by group, R queries, R gates, a key and a value: 2 R + 2 heads of d numbers.
"""

import torch
import triton
import triton.language as tl

_TOKENS = 16  # of a tile, which 128 threads read by 16 bytes each
_WARPS = 4
_SUMS = 64  # programs of each head in the backward pass; each sums the gradients of the norms' weights of its tokens
_BLOCK = 2048  # numbers of a program of the gates


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


def gated(
    x: torch.Tensor, gate: torch.Tensor, buffers: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
) -> torch.Tensor:
    """Return x * sigmoid(gate) in x's dtype and shape, computed in float32.

    Args:
        gate: as many numbers as `x`, in the same order.
        buffers: memory for the output and for the gate's gradient, shaped as `x` and `gate`; None for new memory.
    """
    return _Gated.apply(x, gate, buffers)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, q_weight, k_weight, numbers, heads):
        groups, per_group, head_dim = heads
        tokens = len(mixed)
        q, gate = (mixed.new_empty(tokens, groups * per_group, head_dim) for _ in range(2))
        k, v = (mixed.new_empty(tokens, groups, head_dim) for _ in range(2))
        # Only the sizes of the heads are constants of the kernels, so new lengths need no compilation.
        sizes = {"G": groups, "R": per_group, "D": head_dim, "PAIRS": cos.size(1)}
        widths = {"WIDTH": triton.next_power_of_2(head_dim), "HALF": triton.next_power_of_2(cos.size(1))}
        ctx.meta = {**sizes, **widths, "TOKENS": _TOKENS, "num_warps": _WARPS}
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


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, buffers):
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate)
        out, ctx.d_gate = buffers
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


@triton.jit
def _load_pairs(at, PAIRS: tl.constexpr, mask):
    """Return the first and the second components of pairs, in float32."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + PAIRS, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    mixed, cos, sin, q_weight, k_weight, q, k, v, gate, eps, centre, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    # One slot of a group per program: a query, a gate, the key or the value. `slot` is the same for a whole program, so
    # the branches cost nothing.
    SLOTS: tl.constexpr = 2 * R + 2
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    group, slot = tl.program_id(1) // SLOTS, tl.program_id(1) % SLOTS
    source = mixed + (t * G * SLOTS + tl.program_id(1)) * D
    of_group = t * G + group  # of a key or a value
    head = of_group * R + slot % R  # of a query or a gate
    column, pair = tl.arange(0, WIDTH)[None, :], tl.arange(0, HALF)[None, :]
    seen, is_pair = (t < tokens) & (column < D), (t < tokens) & (pair < PAIRS)
    x = tl.load(source + column, mask=seen, other=0.0).to(tl.float32)
    if (slot < R) | (slot == SLOTS - 2):
        weight, place = q_weight, q + head * D
        if slot == SLOTS - 2:
            weight, place = k_weight, k + of_group * D
        rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        # The components from 2 p on, normalised; the pairs follow below, from a second read.
        x *= rate * (tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + centre)
        tl.store(place + column, x, mask=seen & (column >= 2 * PAIRS))
        c = tl.load(cos + t * PAIRS + pair, mask=is_pair, other=0.0)
        s = tl.load(sin + t * PAIRS + pair, mask=is_pair, other=0.0)
        first, second = _load_pairs(source + pair, PAIRS, is_pair)
        of_first, of_second = _load_pairs(weight + pair, PAIRS, pair < PAIRS)
        first *= rate * (of_first + centre)
        second *= rate * (of_second + centre)
        tl.store(place + pair, first * c - second * s, mask=is_pair)
        tl.store(place + PAIRS + pair, second * c + first * s, mask=is_pair)
    else:
        place = gate + head * D
        if slot == SLOTS - 1:
            place = v + of_group * D
        tl.store(place + column, x, mask=seen)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    dq, dk, dv, d_gate, mixed, cos, sin, q_weight, k_weight, d_mixed, sums, eps, centre, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 2 * R + 2
    group, slot = tl.program_id(1) // SLOTS, tl.program_id(1) % SLOTS
    is_head = (slot < R) | (slot == SLOTS - 2)  # of queries or keys
    column, pair = tl.arange(0, WIDTH)[None, :], tl.arange(0, HALF)[None, :]
    weight = q_weight
    if slot == SLOTS - 2:
        weight = k_weight
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + centre
    w_first, w_second = _load_pairs(weight + pair, PAIRS, pair < PAIRS)
    w_first, w_second = w_first + centre, w_second + centre
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    total_first, total_second = tl.zeros((TOKENS, HALF), tl.float32), tl.zeros((TOKENS, HALF), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        t = tl.arange(0, TOKENS).to(tl.int64)[:, None] + block * TOKENS
        place = (t * G * SLOTS + tl.program_id(1)) * D
        of_group = (t * G + group) * D
        of_head = ((t * G + group) * R + slot % R) * D
        seen, is_pair = (t < tokens) & (column < D), (t < tokens) & (pair < PAIRS)
        at = d_gate + of_head
        if slot < R:
            at = dq + of_head
        elif slot == SLOTS - 2:
            at = dk + of_group
        elif slot == SLOTS - 1:
            at = dv + of_group
        g = tl.load(at + column, mask=seen, other=0.0).to(tl.float32)
        if is_head:
            g = tl.where(column >= 2 * PAIRS, g, 0.0)  # the pairs' gradients are turned back below
            x = tl.load(mixed + place + column, mask=seen, other=0.0).to(tl.float32)
            first, second = _load_pairs(mixed + place + pair, PAIRS, is_pair)
            rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x, first, second = x * rate, first * rate, second * rate
            c = tl.load(cos + t * PAIRS + pair, mask=is_pair, other=0.0)
            s = tl.load(sin + t * PAIRS + pair, mask=is_pair, other=0.0)
            turned_first, turned_second = _load_pairs(at + pair, PAIRS, is_pair)
            g_first = turned_first * c + turned_second * s
            g_second = turned_second * c - turned_first * s
            total += g * x
            total_first += g_first * first
            total_second += g_second * second
            g, g_first, g_second = g * w, g_first * w_first, g_second * w_second
            mean = tl.sum(g * x, 1) + tl.sum(g_first * first + g_second * second, 1)
            mean = mean[:, None] / D
            tl.store(d_mixed + place + pair, rate * (g_first - first * mean), mask=is_pair)
            tl.store(d_mixed + place + PAIRS + pair, rate * (g_second - second * mean), mask=is_pair)
            g = rate * (g - x * mean)
            seen &= column >= 2 * PAIRS
        tl.store(d_mixed + place + column, g, mask=seen)
    if is_head:
        at = sums + (tl.program_id(0) * G * SLOTS + tl.program_id(1)) * D
        own = (column < D) & (column >= 2 * PAIRS)
        tl.store(at + column, tl.sum(total, 0)[None, :], mask=own)
        tl.store(at + pair, tl.sum(total_first, 0)[None, :], mask=pair < PAIRS)
        tl.store(at + PAIRS + pair, tl.sum(total_second, 0)[None, :], mask=pair < PAIRS)


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
