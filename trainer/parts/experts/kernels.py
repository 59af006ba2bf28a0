"""The experts of a layer as one function: torch's grouped products, and kernels for what is between them (Triton, CUDA
only).

The routing weights are applied where the gates are, so that the sum over a token's experts reads each row once, and
their gradient is a sum over an expert's width, as in SonicMoE (arXiv:2512.14080).

Adapters cost no passes over the rows beside their own small products: rows are followed by their products with A, and
matrices by B, so that one product adds the two. Backward does the same with the transposed matrices.

On ranks that divide the experts, most of the rows may belong to none of this rank's. They come after the last expert's
end, where the grouped products write nothing, and the kernels neither read nor write them. Their number is known on the
device alone, so all R rows have memory: nothing waits, and a CUDA graph can hold the layer.

s = tokens, E = experts, k = experts per token, R = s * k rows sorted by expert, D = hidden size, N = width of one
expert, r = rank of the adapters, 0 without.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from trainer.layers.kernels import unpack_rows
from trainer.parts.experts.dispatch import Order

# Warps of every kernel here, and columns of a token that one program copies or sums.
_WARPS, _COLUMNS = 4, 2048


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix per expert, with the adapters that are added to it."""

    base: torch.Tensor  # (E, out, in) bf16, or uint8 codes, see `float8_base.pack`
    scale: torch.Tensor | None = None  # (E * out,) float32 factors of the codes; None for bf16
    a: torch.Tensor | None = None  # (E, r, in); None without adapters
    b: torch.Tensor | None = None  # (E, out, r), times the adapters' scaling

    def __iter__(self):
        return iter((self.base, self.scale, self.a, self.b))

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.size(1)

    def wide(self) -> torch.Tensor:
        """Return (E, out, in + r): each matrix, and B beside it."""
        return self._beside(self.b, axis=2)

    def tall(self) -> torch.Tensor:
        """Return (E, out + r, in): each matrix, and A below it."""
        return self._beside(self.a, axis=1)

    def _beside(self, other: torch.Tensor | None, axis: int) -> torch.Tensor:
        if other is None and self.scale is None:
            return self.base
        size = list(self.base.shape)
        size[axis] += self.rank
        joined = torch.empty(
            size, dtype=torch.bfloat16 if self.scale is not None else self.base.dtype, device=self.base.device
        )
        first, second = joined.split((self.base.size(axis), self.rank), axis)
        if self.scale is None:
            first.copy_(self.base)
        else:
            unpack_rows(self.base, self.scale, into=first)
        if other is not None:
            second.copy_(other)
        return joined


def mixed_experts(
    hidden: torch.Tensor, weights: torch.Tensor, order: Order, gate_up: Matrices, down: Matrices, keep_gates: bool
) -> torch.Tensor:
    """Return (s, D) bf16: the sum of each token's gated MLPs with silu, by their weights. Does not wait for the device.

    Args:
        hidden: (s, D) bf16.
        weights: (s, k) bf16.
        order: the order of the rows by expert.
        gate_up: out = 2 N, in = D; the rank of adapters is a multiple of ROW_MULTIPLE.
        down: out = D, in = N.
        keep_gates: whether (R, 2 N) are kept for backward, which else computes the first product again.
    """
    of_order = order.permutation, order.inverse, order.ends
    return _Mixed.apply(hidden.contiguous(), weights.contiguous(), keep_gates, *of_order, *gate_up, *down)


class _Mixed(torch.autograd.Function):
    """Backward computes the rows of the tokens and the experts' inner outputs again: a layer keeps only its gates, or
    not even these."""

    @staticmethod
    def forward(ctx, hidden, weights, keep_gates, order, inverse, ends, *matrices):
        gate_up, down = Matrices(*matrices[:4]), Matrices(*matrices[4:])
        rows = _to_rows(hidden, inverse, ends, gate_up.rank)  # (R, D + r)
        of_hidden = _follow(rows, gate_up.a, ends)  # (R, r): the products with A stand behind each row
        # [x | x A^T] @ [W | B]^T = x W^T + x A^T B^T: one product for the matrix and its adapter.
        gates = F.grouped_mm(rows, gate_up.wide().transpose(1, 2), offs=ends)
        width = gates.size(1) // 2
        inner = gates.new_empty(len(gates), width + down.rank)  # (R, N + r)
        _gate_fwd[(len(gates),)](gates, weights, order, ends, inner, len(ends), width, inner.size(1), **_by_rows(width))
        of_inner = _follow(inner, down.a, ends)
        kept = gates if keep_gates else None
        ctx.save_for_backward(hidden, weights, order, inverse, ends, kept, of_hidden, of_inner, *matrices)
        return _to_tokens(F.grouped_mm(inner, down.wide().transpose(1, 2), offs=ends), inverse, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weights, order, inverse, ends, gates, of_hidden, of_inner, *matrices = ctx.saved_tensors
        gate_up, down = Matrices(*matrices[:4]), Matrices(*matrices[4:])
        needs = ctx.needs_input_grad
        if gates is None:
            rows = _to_rows(hidden, inverse, ends, gate_up.rank)
            if of_hidden is not None:
                rows[:, hidden.size(1) :] = of_hidden
            gates = F.grouped_mm(rows, gate_up.wide().transpose(1, 2), offs=ends)
        # As forward, with the transposed matrices: [dy | dy B] @ [W ; A] = dy W + dy B A.
        rows, size = _to_rows(grad.contiguous(), inverse, ends, down.rank), grad.size(1)
        low = _follow(rows, None if down.b is None else down.b.transpose(1, 2), ends)
        d_inner = F.grouped_mm(rows, down.tall(), offs=ends)
        width = d_inner.size(1)
        inner, d_weights = torch.empty_like(d_inner), torch.zeros_like(weights)
        d_gates = gates.new_empty(len(gates), 2 * width + gate_up.rank)
        _gate_bwd[(len(gates),)](
            *(d_inner, gates, weights, order, ends, d_gates, inner, d_weights, len(ends), width, d_gates.size(1)),
            **_by_rows(width),
        )
        of_down = _gradients(rows[:, :size], inner, low, of_inner, ends, needs[10:])
        low = _follow(d_gates, None if gate_up.b is None else gate_up.b.transpose(1, 2), ends)
        d_hidden = _to_tokens(F.grouped_mm(d_gates, gate_up.tall(), offs=ends), inverse, ends) if needs[0] else None
        # The inputs of the first product, only if W or A of gate and up are trained (inputs 6 and 8 of forward).
        rows = _to_rows(hidden, inverse, ends) if needs[6] or needs[8] else None
        of_gate_up = _gradients(d_gates[:, : 2 * width], rows, low, of_hidden, ends, needs[6:10])
        return d_hidden, d_weights, None, None, None, None, *of_gate_up, *of_down


def _follow(rows: torch.Tensor, matrices: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor | None:
    """Set the last numbers of rows (R, in + r) to the products of the first with (E, r, in); return these (R, r)."""
    if matrices is None:
        return None
    width = matrices.size(2)
    products = F.grouped_mm(rows[:, :width], matrices.transpose(1, 2), offs=ends)
    rows[:, width:] = products
    return products  # a tensor of its own, because a view that is saved for backward would keep all of `rows`


def _gradients(
    d_out: torch.Tensor,
    rows: torch.Tensor | None,
    d_low: torch.Tensor | None,
    low: torch.Tensor | None,
    ends: torch.Tensor,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `Matrices`.

    Args:
        d_out: (R, out) gradients of the products.
        rows: (R, in) what was multiplied.
        d_low: (R, r) gradients of its products with A.
        low: (R, r) its products with A.
    """
    d_base = F.grouped_mm(d_out.t(), rows, offs=ends) if needs[0] else None
    d_a = F.grouped_mm(d_low.t(), rows, offs=ends) if needs[2] else None
    d_b = F.grouped_mm(d_out.t(), low, offs=ends) if needs[3] else None
    return d_base, None, d_a, d_b


def _to_rows(tokens: torch.Tensor, inverse: torch.Tensor, ends: torch.Tensor, rank: int = 0) -> torch.Tensor:
    """(s, D) -> (R, D + r), whose last numbers are not set."""
    rows = tokens.new_empty(inverse.numel(), tokens.size(1) + rank)
    grid, launch = _by_columns(tokens)
    _spread[grid](tokens, inverse, ends, rows, len(ends), tokens.size(1), rows.size(1), K=inverse.size(1), **launch)
    return rows


def _to_tokens(rows: torch.Tensor, inverse: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(R, D) -> (s, D)."""
    tokens = rows.new_empty(len(inverse), rows.size(1))
    grid, launch = _by_columns(tokens)
    _combine[grid](rows, inverse, ends, tokens, len(ends), rows.size(1), K=inverse.size(1), **launch)
    return tokens


def _by_columns(tokens: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the settings of a kernel whose programs take some columns of a token."""
    block = min(_COLUMNS, triton.next_power_of_2(tokens.size(1)))
    return (len(tokens), triton.cdiv(tokens.size(1), block)), {"BLOCK": block, "num_warps": _WARPS}


def _by_rows(width: int) -> dict[str, int]:
    """Return the settings of a kernel whose programs take a whole row each."""
    return {"BLOCK": triton.next_power_of_2(width), "num_warps": _WARPS}


@triton.jit
def _spread(tokens, places, ends, rows, E, D, STRIDE, K: tl.constexpr, BLOCK: tl.constexpr):
    """Copy each token to those of its K rows that come before the last end; rows are STRIDE apart."""
    num_rows = tl.load(ends + E - 1)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(tokens + token * D + column, mask=inside)
    for number in range(K):
        row = tl.load(places + token * K + number)
        tl.store(rows + row * STRIDE + column, value, mask=inside & (row < num_rows))


@triton.jit
def _combine(rows, places, ends, tokens, E, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum those of the K rows of each token that come before the last end, in float32 and always in the same order."""
    num_rows = tl.load(ends + E - 1)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(K):
        row = tl.load(places + token * K + number)
        total += tl.load(rows + row * D + column, mask=inside & (row < num_rows), other=0.0).to(tl.float32)
    tl.store(tokens + token * D + column, total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def _gate_fwd(gate_up, weights, order, ends, out, E, N, STRIDE, BLOCK: tl.constexpr):
    """weight * silu(gate) * up of a row before the last end; the rows of `out` are STRIDE apart."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + E - 1):
        return
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    value = weight * gate * tl.sigmoid(gate) * up
    tl.store(out + row * STRIDE + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_bwd(d_out, gate_up, weights, order, ends, d_gate_up, out, d_weights, E, N, STRIDE, BLOCK: tl.constexpr):
    """The gradients of gates, ups and weight of a row before the last end, and its output again; the rows of
    `d_gate_up` are STRIDE apart."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + E - 1):
        return
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row * 2 * N + column
    place = tl.load(order + row)
    weight = tl.load(weights + place).to(tl.float32)
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + N, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row * N + column, mask=inside, other=0.0).to(tl.float32)
    soft = tl.sigmoid(gate)
    opened = gate * soft
    tl.store(d_weights + place, tl.sum(dy * opened * up).to(d_weights.dtype.element_ty))
    tl.store(out + row * N + column, (weight * opened * up).to(out.dtype.element_ty), mask=inside)
    dy *= weight
    at = row * STRIDE + column
    tl.store(d_gate_up + at, (dy * up * (soft + opened * (1.0 - soft))).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + at + N, (dy * opened).to(d_gate_up.dtype.element_ty), mask=inside)
