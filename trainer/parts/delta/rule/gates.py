"""The gates of a gated delta net (Triton): decay and beta before the rule, and the gated norm after it.

N = chunks of C = 64 tokens, H = value heads, D = head dim:
    g = -exp(A_log) softplus(a + dt_bias), decay = g cumulated inside the chunk, as the rule's kernels read it
    beta = sigmoid(b)
    out = RMS norm of each head of o, times its weight (centred at one), times silu(z)

One kernel runs forward and one backward for each of the two.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trainer.data.packed_chunks import CHUNK, PackedChunks

# Of the norm: rows of a program, and programs of the backward pass; each sums the weight's gradient over its rows.
ROWS = 16
_PROGRAMS = 132 * 4


def delta_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    chunks: PackedChunks,
    buffers: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute decay and beta, in float32 from the read on.

    Args:
        a: (T, H), heads contiguous; rows may be slices of wider rows.
        b: (T, H), laid out like a.
        a_log: (H,).
        dt_bias: (H,).
        buffers: memory for the gradients of a and b, laid out like a; None for new memory.

    Returns:
        Decay and beta (N, H, 64) float32; where a chunk has no token, the chunk's last decay and beta 0.
    """
    return _Gates.apply(a, b, a_log, dt_bias, chunks, buffers)


def gated_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    buffers: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Normalise o and gate it with z: (T, H, D) twice and (D,) -> (T, H, D), in float32 from the read to the write.

    Rows of z may be slices of wider rows; heads of z must be contiguous.

    Args:
        buffers: memory for the output (T, H * D) and for the gradient of z, laid out like z; None for new memory.
    """
    return _GatedNorm.apply(o, z, weight, eps, buffers)


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, a_log, dt_bias, chunks: PackedChunks, buffers):
        heads, cells = a.shape[1], chunks.chunks
        ctx.meta = {"H": heads, "H_P2": triton.next_power_of_2(heads), "C": CHUNK}
        ctx.chunks, ctx.buffers = chunks, buffers
        decay, beta = (a.new_empty(cells, heads, CHUNK, dtype=torch.float32) for _ in range(2))
        _gates_forward[(cells,)](
            *(a, b, a_log, dt_bias, chunks.starts, chunks.rows, decay, beta, a.stride(0), b.stride(0)), **ctx.meta
        )
        ctx.save_for_backward(a, a_log, dt_bias, beta)
        return decay, beta

    @staticmethod
    def backward(ctx, d_decay, d_beta):
        a, a_log, dt_bias, beta = ctx.saved_tensors
        chunks, heads = ctx.chunks, ctx.meta["H"]
        da, db = ctx.buffers or (a.new_empty(len(a), heads) for _ in range(2))
        sums = a.new_empty(chunks.chunks, 2, heads, dtype=torch.float32)
        grads = (d_decay.contiguous(), d_beta.contiguous())
        _gates_backward[(chunks.chunks,)](
            *(a, a_log, dt_bias, beta, chunks.starts, chunks.rows, *grads, da, db, sums),
            *(x.stride(0) for x in (a, da, db)),
            **ctx.meta,
        )
        d_a_log, d_dt_bias = sums.sum(0)
        return da, db, d_a_log.to(a_log.dtype), d_dt_bias.to(dt_bias.dtype), None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, z, weight, eps, buffers):
        o = o.contiguous()
        tokens, heads, dim = o.shape
        out, ctx.d_z = (None if x is None else x.view(o.shape) for x in buffers)
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


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    # 1 + small keeps only seven digits; below 0.01 the series is exact to that many
    return tl.maximum(x, 0.0) + tl.where(small > 0.01, tl.log(1.0 + small), small * (1.0 - small * (0.5 - small / 3.0)))


@triton.jit
def _gates_forward(
    a, b, a_log, dt_bias, starts, rows, decay, beta, stride_a, stride_b,
    H: tl.constexpr, H_P2: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, C)[:, None]
    head = tl.arange(0, H_P2)[None, :]
    start = tl.load(starts + chunk).to(tl.int64)
    inside = (token < tl.load(rows + chunk)) & (head < H)
    x = tl.load(a + (start + token) * stride_a + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=head < H, other=0.0).to(tl.float32))
    g = tl.where(inside, -rate * _softplus(x), 0.0)
    y = tl.load(b + (start + token) * stride_b + head, mask=inside, other=0.0).to(tl.float32)
    cell = (chunk * H + head) * C + token
    tl.store(decay + cell, tl.cumsum(g, 0), mask=head < H)
    tl.store(beta + cell, tl.where(inside, tl.sigmoid(y), 0.0), mask=head < H)


@triton.jit
def _gates_backward(
    a, a_log, dt_bias, beta, starts, rows, d_decay, d_beta, da, db, sums, stride_a, stride_da, stride_db,
    H: tl.constexpr, H_P2: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, C)[:, None]
    head = tl.arange(0, H_P2)[None, :]
    start = tl.load(starts + chunk).to(tl.int64)
    inside = (token < tl.load(rows + chunk)) & (head < H)
    x = tl.load(a + (start + token) * stride_a + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=head < H, other=0.0).to(tl.float32))
    cell = (chunk * H + head) * C + token
    dg = tl.load(d_decay + cell, mask=head < H, other=0.0)
    # The gradient of a cumulated sum is the sum from the end.
    dg = tl.where(inside, tl.cumsum(dg, 0, reverse=True), 0.0)
    dx = -dg * rate * tl.sigmoid(x)
    y = tl.load(beta + cell, mask=head < H, other=0.0)
    dy = tl.load(d_beta + cell, mask=head < H, other=0.0) * y * (1.0 - y)
    tl.store(da + (start + token) * stride_da + head, dx.to(da.dtype.element_ty), mask=inside)
    tl.store(db + (start + token) * stride_db + head, dy.to(db.dtype.element_ty), mask=inside)
    place = sums + chunk * 2 * H + tl.arange(0, H_P2)
    seen = tl.arange(0, H_P2) < H
    tl.store(place, tl.sum(-dg * rate * _softplus(x), 0), mask=seen)
    tl.store(place + H, tl.sum(dx, 0), mask=seen)


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
