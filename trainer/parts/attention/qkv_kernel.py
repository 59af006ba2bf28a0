"""Split the mixed projection into queries, keys and values, normalise and rotate, in one kernel (Triton, CUDA only).

Plain torch moves the values through memory six times forward and seven times backward.

T = tokens or patches, G = groups of heads, R = query heads per group, d = head dim, p = pairs that are rotated.
"""

import torch
import triton
import triton.language as tl

# Programs of the backward pass with norms; each sums the gradient of the norms' weights over its tokens.
_PROGRAMS = 132 * 8
_NUMBERS = 4096  # of a projection that a program holds; with 8192 registers spill


@triton.jit
def _rows(G: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr, ROWS_P2: tl.constexpr):
    """Return the rows of a program's heads: group by group R queries, R gates if there are any, a key, a value."""
    row = tl.arange(0, ROWS_P2)[:, None]
    SLOTS: tl.constexpr = R * (1 + GATED) + 2
    group, slot = row // SLOTS, row % SLOTS
    inside = row < G * SLOTS
    is_gate = inside & (slot >= R) & (slot < SLOTS - 2)
    is_k, is_v = inside & (slot == SLOTS - 2), inside & (slot == SLOTS - 1)
    head = group * R + slot % R  # of a query or a gate
    return row, inside, inside & (slot < R), is_gate, is_k, is_v, head, group


@triton.jit
def _load(mixed, q_weight, k_weight, row, column, inside, is_q, CENTRE, D: tl.constexpr, NORM: tl.constexpr):
    """Return values in float32, and the weights of their norms."""
    value = tl.load(mixed + row * D + column, mask=inside, other=0.0).to(tl.float32)
    weight = value
    if NORM:
        of_q = tl.load(q_weight + column, mask=column < D, other=0.0).to(tl.float32)
        of_k = tl.load(k_weight + column, mask=column < D, other=0.0).to(tl.float32)
        weight = tl.where(is_q, of_q, of_k) + CENTRE
    return value, weight


@triton.jit
def _store(
    q, k, v, gate, head, group, column, is_q, is_gate, is_k, is_v, turned, plain, seen,
    D: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write normalised queries and keys, and values and gates as they are."""
    tl.store(q + head * D + column, turned, mask=is_q & seen)
    tl.store(k + group * D + column, turned, mask=is_k & seen)
    tl.store(v + group * D + column, plain, mask=is_v & seen)
    if GATED:
        tl.store(gate + head * D + column, plain, mask=is_gate & seen)


@triton.jit
def _gradients(
    dq, dk, dv, d_gate, head, group, column, is_q, is_gate, is_k, is_v, seen,
    D: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the gradients of queries and keys, and those of values and gates, in float32."""
    turned = tl.load(dq + head * D + column, mask=is_q & seen, other=0.0).to(tl.float32)
    turned += tl.load(dk + group * D + column, mask=is_k & seen, other=0.0).to(tl.float32)
    plain = tl.load(dv + group * D + column, mask=is_v & seen, other=0.0).to(tl.float32)
    if GATED:
        plain += tl.load(d_gate + head * D + column, mask=is_gate & seen, other=0.0).to(tl.float32)
    return turned, plain


@triton.jit
def _split_forward(
    mixed, cos, sin, q_weight, k_weight, q, k, v, gate, eps, CENTRE,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
    SPLIT: tl.constexpr, ROWS_P2: tl.constexpr, PAIRS_P2: tl.constexpr, REST_P2: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row, inside, is_q, is_gate, is_k, is_v, head, group = _rows(G, R, GATED, ROWS_P2)
    pair = tl.arange(0, PAIRS_P2)[None, :]
    paired = pair < PAIRS
    mixed += t * G * (R * (1 + GATED) + 2) * D
    q += t * G * R * D
    gate += t * G * R * D
    k += t * G * D
    v += t * G * D
    x1, w1 = _load(mixed, q_weight, k_weight, row, pair, inside & paired, is_q, CENTRE, D, NORM)
    x2, w2 = _load(mixed, q_weight, k_weight, row, pair + PAIRS, inside & paired, is_q, CENTRE, D, NORM)
    c = tl.load(cos + t // SPLIT * PAIRS + pair, mask=paired, other=0.0)
    s = tl.load(sin + t // SPLIT * PAIRS + pair, mask=paired, other=0.0)
    n1, n2 = x1, x2
    if REST_P2:
        column = 2 * PAIRS + tl.arange(0, REST_P2)[None, :]
        seen = column < D
        x3, w3 = _load(mixed, q_weight, k_weight, row, column, inside & seen, is_q, CENTRE, D, NORM)
        n3 = x3
    if NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if REST_P2:
            squares += tl.sum(x3 * x3, 1)
        rstd = tl.rsqrt(squares / D + eps)[:, None]
        n1, n2 = x1 * rstd * w1, x2 * rstd * w2
        if REST_P2:
            n3 = x3 * rstd * w3
    y1, y2 = n1 * c - n2 * s, n2 * c + n1 * s
    _store(q, k, v, gate, head, group, pair, is_q, is_gate, is_k, is_v, y1, x1, paired, D, GATED)
    _store(q, k, v, gate, head, group, pair + PAIRS, is_q, is_gate, is_k, is_v, y2, x2, paired, D, GATED)
    if REST_P2:
        _store(q, k, v, gate, head, group, column, is_q, is_gate, is_k, is_v, n3, x3, seen, D, GATED)


@triton.jit
def _put_sums(place, column, sums, is_q, is_k, seen, D: tl.constexpr):
    """Write the sums over the query rows, and D numbers further those over the key rows."""
    tl.store(place + column, tl.sum(tl.where(is_q, sums, 0.0), 0)[None, :], mask=seen)
    tl.store(place + D + column, tl.sum(tl.where(is_k, sums, 0.0), 0)[None, :], mask=seen)


@triton.jit(do_not_specialize=["tokens"])
def _split_backward(
    dq, dk, dv, d_gate, mixed, cos, sin, q_weight, k_weight, d_mixed, d_weights, eps, CENTRE, tokens,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
    SPLIT: tl.constexpr, ROWS_P2: tl.constexpr, PAIRS_P2: tl.constexpr, REST_P2: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = G * (R * (1 + GATED) + 2) * D
    row, inside, is_q, is_gate, is_k, is_v, head, group = _rows(G, R, GATED, ROWS_P2)
    is_plain = is_v | is_gate
    pair = tl.arange(0, PAIRS_P2)[None, :]
    paired = pair < PAIRS
    at = row * D
    if REST_P2:
        column = 2 * PAIRS + tl.arange(0, REST_P2)[None, :]
        seen = column < D
    if NORM:
        sum1 = tl.zeros((ROWS_P2, PAIRS_P2), tl.float32)
        sum2 = tl.zeros((ROWS_P2, PAIRS_P2), tl.float32)
        if REST_P2:
            sum3 = tl.zeros((ROWS_P2, REST_P2), tl.float32)
    t = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), tokens, tl.num_programs(0)):
        of_q, of_kv, of_mixed = t * G * R * D, t * G * D, t * WIDTH
        q_at, k_at, v_at, gate_at = dq + of_q, dk + of_kv, dv + of_kv, d_gate + of_q
        g1, p1 = _gradients(
            q_at, k_at, v_at, gate_at, head, group, pair, is_q, is_gate, is_k, is_v, paired, D, GATED
        )  # fmt: skip
        g2, p2 = _gradients(
            q_at, k_at, v_at, gate_at, head, group, pair + PAIRS, is_q, is_gate, is_k, is_v, paired, D, GATED
        )  # fmt: skip
        c = tl.load(cos + t // SPLIT * PAIRS + pair, mask=paired, other=0.0)
        s = tl.load(sin + t // SPLIT * PAIRS + pair, mask=paired, other=0.0)
        n1, n2 = g1 * c + g2 * s, g2 * c - g1 * s
        if REST_P2:
            n3, p3 = _gradients(
                q_at, k_at, v_at, gate_at, head, group, column, is_q, is_gate, is_k, is_v, seen, D, GATED
            )  # fmt: skip
        if NORM:
            x = mixed + of_mixed
            x1, w1 = _load(x, q_weight, k_weight, row, pair, inside & paired, is_q, CENTRE, D, NORM)
            x2, w2 = _load(x, q_weight, k_weight, row, pair + PAIRS, inside & paired, is_q, CENTRE, D, NORM)
            squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
            if REST_P2:
                x3, w3 = _load(x, q_weight, k_weight, row, column, inside & seen, is_q, CENTRE, D, NORM)
                squares += tl.sum(x3 * x3, 1)
            rstd = tl.rsqrt(squares / D + eps)[:, None]
            x1 *= rstd
            x2 *= rstd
            sum1 += n1 * x1
            sum2 += n2 * x2
            n1 *= w1
            n2 *= w2
            products = tl.sum(n1 * x1, 1) + tl.sum(n2 * x2, 1)
            if REST_P2:
                x3 *= rstd
                sum3 += n3 * x3
                n3 *= w3
                products += tl.sum(n3 * x3, 1)
            mean = (products / D)[:, None]
            n1, n2 = rstd * (n1 - x1 * mean), rstd * (n2 - x2 * mean)
            if REST_P2:
                n3 = rstd * (n3 - x3 * mean)
        place = d_mixed + of_mixed + at
        tl.store(place + pair, tl.where(is_plain, p1, n1), mask=inside & paired)
        tl.store(place + pair + PAIRS, tl.where(is_plain, p2, n2), mask=inside & paired)
        if REST_P2:
            tl.store(place + column, tl.where(is_plain, p3, n3), mask=inside & seen)
        t += tl.num_programs(0)
    if NORM:
        place = d_weights + tl.program_id(0) * 2 * D
        _put_sums(place, pair, sum1, is_q, is_k, paired, D)
        _put_sums(place, pair + PAIRS, sum2, is_q, is_k, paired, D)
        if REST_P2:
            _put_sums(place, column, sum3, is_q, is_k, seen, D)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, q_weight, k_weight, eps, centre, heads):
        groups, per_group, head_dim = heads
        (tokens, width), pairs = mixed.shape, cos.size(1)
        gated = width != groups * (per_group + 2) * head_dim
        rest, of_group = head_dim - 2 * pairs, width // groups // head_dim
        # The groups of a token follow each other, so that a part of them is like a token of its own.
        most = _NUMBERS // triton.next_power_of_2(head_dim)
        splits = [n for n in range(1, groups + 1) if groups % n == 0]
        split = next((n for n in splits if triton.next_power_of_2(groups // n * of_group) <= most), groups)
        ctx.meta = {
            "G": groups // split,
            "R": per_group,
            "D": head_dim,
            "PAIRS": pairs,
            "GATED": gated,
            "NORM": q_weight is not None,
            "SPLIT": split,
            "ROWS_P2": triton.next_power_of_2(groups // split * of_group),
            "PAIRS_P2": triton.next_power_of_2(pairs),
            "REST_P2": triton.next_power_of_2(rest) if rest else 0,
        }
        ctx.numbers = eps, centre
        q = mixed.new_empty(tokens, groups * per_group, head_dim)
        k, v = (mixed.new_empty(tokens, groups, head_dim) for _ in range(2))
        gate = torch.empty_like(q) if gated else q.new_empty(0)
        _split_forward[(tokens * split,)](mixed, cos, sin, q_weight, k_weight, q, k, v, gate, eps, centre, **ctx.meta)
        ctx.save_for_backward(cos, sin, *((mixed, q_weight, k_weight) if q_weight is not None else ()))
        return q, k, v, gate

    @staticmethod
    def backward(ctx, *grads):
        cos, sin, *norm = ctx.saved_tensors
        mixed, q_weight, k_weight = norm or (None, None, None)
        grads = [x.contiguous() for x in grads]
        tokens, meta, (q, k, _, gate) = len(cos), ctx.meta, grads
        parts = tokens * meta["SPLIT"]
        d_mixed = q.new_empty(tokens, (q.numel() + 2 * k.numel() + gate.numel()) // tokens)
        programs = min(parts, _PROGRAMS) if norm else parts
        sums = q.new_empty(programs, 2, meta["D"], dtype=torch.float32) if norm else None
        _split_backward[(programs,)](
            *grads, mixed, cos, sin, q_weight, k_weight, d_mixed, sums, *ctx.numbers, parts, **meta
        )
        d_weights = sums.sum(0).to(q_weight.dtype) if norm else (None, None)
        return d_mixed, None, None, d_weights[0], d_weights[1], None, None, None


def split_norm_rotate(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    per_group: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Split the heads, normalise queries and keys if they have weights, and rotate them.

    All is computed in float32 from the read to the write. Only the sizes of the heads are constants of the kernel, so
    new lengths need no compilation.

    Args:
        mixed: (T, G * (R + 2) * d), group by group R queries, a key, a value; or (T, G * (2 R + 2) * d) with R gates
            after the queries.
        cos: (T, p) float32; an angle rotates a component with the one p further; the components from 2 p on are not
            rotated.
        sin: (T, p) float32.
        per_group: R.
        q_weight, k_weight: (d,) weights of the norms; None for no norm.
        zero_centred: whether the norms multiply by 1 + weight.

    Returns:
        Queries (T, G * R, d), keys (T, G, d), values (T, G, d), and the gates (T, G * R, d) if there are any.
    """
    heads = groups, per_group, head_dim
    *qkv, gate = _SplitNormRotate.apply(mixed, cos, sin, q_weight, k_weight, eps, float(zero_centred), heads)
    return (*qkv, gate) if gate.numel() else tuple(qkv)
