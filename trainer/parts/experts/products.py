"""Products of rows, sorted by expert, with one matrix per expert.

R = rows: a row for each token and each of its experts, E = experts, D = hidden size.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trainer.layers.lora.float8_base import unpack

ROW_MULTIPLE = 8  # bf16 numbers: for torch's grouped product on a GPU, rows begin at multiples of 16 bytes


class Dispatch(torch.autograd.Function):
    """Rows of tokens in the order of their experts: (s, D) -> (R, D). Its gradient is a sum over a token's rows."""

    @staticmethod
    def forward(ctx, hidden, order, inverse):
        ctx.save_for_backward(inverse)
        return hidden.index_select(0, order // (len(order) // len(hidden)))

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        # A gather, as in forward, so that no order of additions is left to chance.
        return grad[inverse].sum(1), None, None


class Collect(torch.autograd.Function):
    """Rows in the order of their experts, brought back to their tokens: (R, D) -> (s, k, D)."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(order)
        return rows[inverse]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, order), None, None


class Order:
    """The order of rows by expert, given the (s, k) int64 index of each expert of each token.

    Attributes:
        order: (R,) the token's row, token * k + number, at each sorted place.
        inverse: (s, k) the sorted place of each of them.
        ends: (E,) int32 the end of each expert's rows.
    """

    def __init__(self, chosen: torch.Tensor, num_experts: int) -> None:
        experts, self.order = chosen.flatten().sort(stable=True)
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(places), device=places.device)
        self.inverse = places.view_as(chosen)
        numbers = torch.arange(num_experts, device=experts.device)
        self.ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)

    def dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows (R, D) of the tokens (s, D)."""
        return Dispatch.apply(hidden, self.order, self.inverse)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (s, k, D), given the rows (R, D)."""
        return Collect.apply(rows, self.order, self.inverse)


class PackedProduct(torch.autograd.Function):
    """The product of each expert's rows with its frozen matrix in float8. The matrices exist unpacked only while a
    product runs, once forward and once backward.
    """

    @staticmethod
    def forward(ctx, rows, codes, scale, ends):
        """Args: codes: (E, out, in) uint8; scale: (E * out,) float32; see `grouped_product` for the others."""
        ctx.save_for_backward(codes, scale, ends)
        return grouped_product(rows, _unpacked(codes, scale, rows.dtype), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        codes, scale, ends = ctx.saved_tensors
        matrices = _unpacked(codes, scale, grad.dtype).transpose(1, 2)
        return grouped_product(grad.contiguous(), matrices, ends), None, None, None


def _unpacked(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return unpack(codes.flatten(0, 1), scale, dtype).view(codes.shape)


def is_grouped(rows: torch.Tensor) -> bool:
    """Whether torch's grouped product computes with these rows."""
    return rows.is_cuda and rows.dtype is torch.bfloat16


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the product of each expert's rows with its matrix, (R, out).

    Args:
        rows: (R, in), sorted by expert; the last expert's end is R.
        weights: (E, out, in); for torch's grouped product, in and out are multiples of ROW_MULTIPLE.
        ends: (E,) int32 the end of each expert's rows.
    """
    if is_grouped(rows):
        # It does not wait for the device, as the products one by one below do.
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(lengths), weights)])
