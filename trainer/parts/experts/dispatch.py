"""The rows of tokens on their way to their experts and back: sorted by expert, exchanged between ranks, multiplied.

Each of the s tokens is copied to k rows, one for each of its experts. The rows are sorted by expert (`Order`), so that
an expert's rows follow each other and one grouped product multiplies all rows, each with its expert's matrix
(`grouped_product`). Where expert-parallel ranks divide the experts, rows first go to the rank that holds their expert
(`compute_on_ranks`).

R = s * k rows of this rank's tokens; G = rows that this rank computes; E = experts; D = hidden size.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from trainer.layers.float8_base import unpack

ROW_MULTIPLE = 8  # bf16 numbers: for torch's grouped product on a GPU, rows begin at multiples of 16 bytes


class Order:
    """The order of rows by expert, given the (s, k) int64 index of each expert of each token.

    Attributes:
        permutation: (R,) the token's row, token * k + number, at each sorted place.
        inverse: (s, k) the sorted place of each of them.
        ends: (E,) int32 the end of each expert's rows.
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


def compute_on_ranks(
    hidden: torch.Tensor,
    order: Order,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    group: ProcessGroup,
) -> torch.Tensor:
    """Return the output of every row's expert, (s, k, D), given the tokens (s, D). A collective of the group, whose
    ranks hold equal numbers of consecutive experts.

    Args:
        order: the order of the rows by expert.
        compute: maps rows (G, D), sorted by this rank's experts, and the end of each expert's rows to (G, D).
    """
    ranks, experts = group.size(), len(order.ends)
    counts = order.ends.diff(prepend=order.ends.new_zeros(1))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, experts // ranks)  # by the rank that sends, then by expert
    # The numbers of rows are needed on the host, so this waits for the device.
    sums = torch.stack([counts.view(ranks, -1).sum(1), arriving.sum(1)]).tolist()
    send, receive = ([int(number) for number in numbers] for numbers in sums)
    # Sorted by expert is sorted by rank, because a rank's experts are consecutive.
    rows = AllToAll.apply(order.dispatch(hidden)[: sum(send)], send, receive, group)
    # The rows arrive sorted by the rank that sent them. Sort them by expert, and remember the way back.
    own = torch.arange(experts // ranks, device=rows.device).repeat(ranks)
    by_expert = own.repeat_interleave(arriving.flatten(), output_size=sum(receive)).argsort(stable=True)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(by_expert), device=rows.device)
    ends = arriving.sum(0).cumsum(0, dtype=torch.int32)
    out = compute(rows.index_select(0, by_expert), ends).index_select(0, back)
    out = AllToAll.apply(out, receive, send, group)
    # A row whose expert is not below E, such as a row of padding, is sent nowhere and has the output zero. These rows
    # are the last.
    nowhere = out.new_zeros(order.permutation.numel() - len(out), out.size(1))
    return order.collect(torch.cat([out, nowhere]))


class AllToAll(torch.autograd.Function):
    """Rows sent to ranks and received from ranks: (sum of `send`, D) -> (sum of `receive`, D).

    The gradient takes the opposite way.
    """

    @staticmethod
    def forward(ctx, rows, send: Sequence[int], receive: Sequence[int], group: ProcessGroup):
        """Args: send, receive: number of rows to and from each rank."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    received = rows.new_empty(sum(receive), rows.size(1))
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


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
