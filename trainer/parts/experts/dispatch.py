"""The rows of tokens on their way to their experts and back: sorted by expert, exchanged between ranks, multiplied.

Each of the s tokens is copied to k rows, one for each of its experts. The rows are sorted by expert (`Order`), so that
an expert's rows follow each other and one grouped product multiplies all rows, each with its expert's matrix
(`grouped_product`). Where expert-parallel ranks divide the experts, each computes the tokens of all ranks with its own
(`TokensOfRanks`).

R = s * k rows; E = experts; D = hidden size.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from trainer.layers.float8_base import unpack
from trainer.layers.recompute import not_kept

ROW_MULTIPLE = 8  # bf16 numbers: for torch's grouped product on a GPU, rows begin at multiples of 16 bytes


class Order:
    """The order of rows by expert, given the (s, k) int64 index of each expert of each token.

    Attributes:
        permutation: (R,) the token's row, token * k + number, at each sorted place.
        inverse: (s, k) the sorted place of each of them.
        ends: (E,) int32 the end of each expert's rows. Rows of an index of E or more are the last, after all ends.
    """

    def __init__(self, chosen: torch.Tensor, num_experts: int) -> None:
        # Stable, so that the rows of an expert stay in the order of their tokens: two runs have the same bits.
        experts, self.permutation = chosen.flatten().sort(stable=True)
        places = torch.empty_like(self.permutation)
        places[self.permutation] = torch.arange(len(places), device=places.device)
        self.inverse = places.view_as(chosen)
        # Searched and not counted (bincount), which would make the host wait for the device.
        numbers = torch.arange(num_experts, device=experts.device)
        self.ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)

    def dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows (R, D) of the tokens (s, D)."""
        return Dispatch.apply(hidden, self.permutation, self.inverse)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (s, k, D), given the rows (R, D)."""
        return Collect.apply(rows, self.permutation, self.inverse)


class Dispatch(torch.autograd.Function):
    """Rows of tokens in the order of their experts: (s, D) -> (R, D). Its gradient is a sum over a token's rows."""

    @staticmethod
    def forward(ctx, hidden, permutation, inverse):
        ctx.save_for_backward(inverse)
        # A row's token is its number divided by k.
        return hidden.index_select(0, permutation // (len(permutation) // len(hidden)))

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        # A gather and a sum. Autograd's index_add would leave the order of the additions to chance.
        return grad[inverse].sum(1), None, None


class Collect(torch.autograd.Function):
    """Rows in the order of their experts, brought back to their tokens: (R, D) -> (s, k, D)."""

    @staticmethod
    def forward(ctx, rows, permutation, inverse):
        ctx.save_for_backward(permutation)
        return rows[inverse]

    @staticmethod
    def backward(ctx, grad):
        (permutation,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, permutation), None, None


class TokensOfRanks:
    """The tokens of all expert-parallel ranks at the experts of this one: gathered, mixed, and summed back to their
    ranks. Each of these is a collective of the group, whose ranks hold equal numbers of consecutive experts.

    A row for each expert would be sent k times; a token is sent once to each rank, which needs most of them (with 8 of
    128 experts, each of 4 ranks 90%), and no rank has to know how many of them. The gather runs beside the router, the
    sum beside what is computed before `end`.

    Args:
        tokens: (m, D) of this rank; m may differ between ranks.
        at_most: the largest m that any rank may have, the same on all.
    """

    def __init__(self, tokens: torch.Tensor, at_most: int, group: ProcessGroup) -> None:
        self._count, self._missing, self._group = len(tokens), at_most - len(tokens), group
        self._gather, self._sum = _Exchange(group, gathers=True), _Exchange(group, gathers=False)
        self._own = F.pad(tokens, (0, 0, 0, self._missing)) if self._missing else tokens.contiguous()
        self._tokens = self._gather.begin(self._own)

    def begin_mix(
        self,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        num_experts: int,
        mix: Callable[[torch.Tensor, torch.Tensor, Order], torch.Tensor],
    ) -> None:
        """Begin to mix the chosen experts of each token.

        Args:
            weights: (m, k) of this rank's tokens.
            chosen: (m, k) int64; a number that is no expert's belongs to none, such as that of padding.
            num_experts: of all ranks.
            mix: maps tokens (n, D), weights (n, k) and the order by this rank's experts to (n, D); the rows after the
                last expert's end belong to no expert of this rank and count as zero.
        """
        own = num_experts // self._group.size()
        chosen = F.pad(chosen, (0, 0, 0, self._missing), value=num_experts)
        exchange = _Exchange(self._group, gathers=True)
        weights = exchange.end(exchange.begin(F.pad(weights, (0, 0, 0, self._missing))))
        with torch.no_grad():
            local = _gathered(chosen, self._group) - self._group.rank() * own
            order = Order(local.where((local >= 0) & (local < own), own), own)
        tokens = self._gather.end(self._tokens)
        with not_kept(tokens, partial(_gathered, group=self._group), self._own):  # backward gathers them again
            mixed = mix(tokens, weights, order)
        self._mixed = self._sum.begin(mixed)

    def end_mix(self) -> torch.Tensor:
        """Return (m, D): the sum of each token's experts, by their weights."""
        return self._sum.end(self._mixed)[: self._count]


class _Exchange:
    """A collective of equal shares that runs beside what is computed between its beginning and its end; that of its
    gradient runs, backward, beside the gradients of the same.

    `gathers`: (n, ...) of each rank -> (ranks * n, ...); else (ranks * n, ...) is summed to each rank's share (n, ...).
    """

    def __init__(self, group: ProcessGroup, gathers: bool) -> None:
        self._group, self.gathers = group, gathers

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that will hold the result, which only `end` may read."""
        return _Begin.apply(x, self)

    def end(self, begun: torch.Tensor) -> torch.Tensor:
        return _End.apply(begun, self)

    def start(self, x: torch.Tensor, gathers: bool) -> torch.Tensor:
        self._sent = x.contiguous()  # held until the end, since the collective reads it
        ranks = self._group.size()
        self._result = x.new_empty(len(x) * ranks if gathers else len(x) // ranks, *x.shape[1:])
        collective = dist.all_gather_into_tensor if gathers else dist.reduce_scatter_tensor
        self._work = collective(self._result, self._sent, group=self._group, async_op=True)
        return self._result

    def wait(self) -> torch.Tensor:
        """Make the device wait, not the host, and return the result."""
        self._work.wait()
        result = self._result
        self._sent = self._result = self._work = None
        return result


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange: _Exchange):
        ctx.exchange = exchange
        return exchange.start(x, exchange.gathers)

    @staticmethod
    def backward(ctx, grad):
        # `grad` is what _End was given, whose exchange has begun there.
        return ctx.exchange.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, begun, exchange: _Exchange):
        ctx.exchange = exchange
        exchange.wait()
        return begun.view_as(begun)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.exchange.start(grad, not ctx.exchange.gathers)
        return grad, None


def _gathered(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


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


def is_grouped(rows: torch.Tensor) -> bool:
    """Whether torch's grouped product computes with these rows."""
    return rows.is_cuda and rows.dtype is torch.bfloat16


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
