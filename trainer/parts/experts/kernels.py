"""The experts of a layer as one function: torch's grouped products, and kernels for what is between them (Triton, CUDA
only).

The routing weights are applied where the gates are, so that the sum over a token's experts reads each row once, and
their gradient is a sum over an expert's width, as in SonicMoE (arXiv:2512.14080).

s = tokens, E = experts, k = experts per token, R = s * k rows sorted by expert, D = hidden size, N = width of one
expert.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from trainer.parts.experts.products import Order

_WARPS, _COLUMNS = 4, 2048


@triton.jit
def _spread(tokens, places, rows, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """Copy each token to its K rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(tokens + token * D + column, mask=inside)
    for number in range(K):
        row = tl.load(places + token * K + number)
        tl.store(rows + row * D + column, value, mask=inside)


@triton.jit
def _combine(rows, places, tokens, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the K rows of each token, in float32 and always in the same order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(K):
        row = tl.load(places + token * K + number)
        total += tl.load(rows + row * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(tokens + token * D + column, total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def _gate_fwd(gate_up, weights, order, out, N, BLOCK: tl.constexpr):
    """weight * silu(gate) * up of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, (weight * gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_bwd(d_out, gate_up, weights, order, d_gate_up, out, d_weights, N, BLOCK: tl.constexpr):
    """The gradients of gates, ups and weight of a row, and its output again."""
    row = tl.program_id(0).to(tl.int64)
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
    tl.store(d_gate_up + at, (dy * up * (soft + opened * (1.0 - soft))).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + at + N, (dy * opened).to(d_gate_up.dtype.element_ty), mask=inside)


class _Mixed(torch.autograd.Function):
    """Backward computes the rows of the tokens and the experts' inner outputs again: a layer keeps only its gates."""

    @staticmethod
    def forward(ctx, hidden, weights, gate_up, down, order, inverse, ends):
        gates = F.grouped_mm(_to_rows(hidden, inverse), gate_up.transpose(1, 2), offs=ends)
        inner = gates.new_empty(len(gates), down.size(2))
        _gate_fwd[(len(gates),)](gates, weights, order, inner, inner.size(1), **_whole(inner))
        ctx.save_for_backward(hidden, weights, gate_up, down, order, inverse, ends, gates)
        return _to_tokens(F.grouped_mm(inner, down.transpose(1, 2), offs=ends), inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weights, gate_up, down, order, inverse, ends, gates = ctx.saved_tensors
        needs_hidden, _, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        rows = _to_rows(grad.contiguous(), inverse)
        d_inner = F.grouped_mm(rows, down, offs=ends)
        inner, d_gates, d_weights = torch.empty_like(d_inner), torch.empty_like(gates), torch.empty_like(weights)
        _gate_bwd[(len(gates),)](
            d_inner, gates, weights, order, d_gates, inner, d_weights, inner.size(1), **_whole(inner)
        )
        d_down = F.grouped_mm(rows.t(), inner, offs=ends) if needs_down else None
        d_hidden = _to_tokens(F.grouped_mm(d_gates, gate_up, offs=ends), inverse) if needs_hidden else None
        d_gate_up = F.grouped_mm(d_gates.t(), _to_rows(hidden, inverse), offs=ends) if needs_gate_up else None
        return d_hidden, d_weights, d_gate_up, d_down, None, None, None


def _to_rows(tokens: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """(s, D) -> (R, D)."""
    rows = tokens.new_empty(inverse.numel(), tokens.size(1))
    _spread[_grid(tokens)](tokens, inverse, rows, tokens.size(1), K=inverse.size(1), **_part(tokens))
    return rows


def _to_tokens(rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """(R, D) -> (s, D)."""
    tokens = rows.new_empty(len(inverse), rows.size(1))
    _combine[_grid(tokens)](rows, inverse, tokens, rows.size(1), K=inverse.size(1), **_part(tokens))
    return tokens


def _part(tokens: torch.Tensor) -> dict[str, int]:
    return {"BLOCK": min(_COLUMNS, triton.next_power_of_2(tokens.size(1))), "num_warps": _WARPS}


def _whole(inner: torch.Tensor) -> dict[str, int]:
    return {"BLOCK": triton.next_power_of_2(inner.size(1)), "num_warps": _WARPS}


def _grid(tokens: torch.Tensor) -> tuple[int, int]:
    return len(tokens), triton.cdiv(tokens.size(1), _part(tokens)["BLOCK"])


def mixed_experts(
    hidden: torch.Tensor, weights: torch.Tensor, order: Order, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return (s, D) bf16: the sum of each token's gated MLPs with silu, by their weights. Does not wait for the device.

    Args:
        hidden: (s, D) bf16.
        weights: (s, k) bf16.
        order: the order of the rows by expert; the last expert's end is R.
        gate_up: (E, 2 N, D) bf16.
        down: (E, D, N) bf16.
    """
    return _Mixed.apply(
        hidden.contiguous(), weights.contiguous(), gate_up, down, order.order, order.inverse, order.ends
    )
