"""Collectives with exact gradients.

They gather rows from ranks that hold different numbers of rows, gather whole sequences from context-parallel slices,
and exchange slices of the sequence for slices of the heads.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, gathered_rows, encoders, users):
        ctx.encoders, ctx.users, ctx.count = encoders, users, len(rows)
        # The gather needs as many rows from every rank.
        padded = rows.new_zeros(gathered_rows, rows.size(1))
        padded[: len(rows)] = rows
        if encoders.size() == 1:
            return padded
        gathered = rows.new_empty(encoders.size() * gathered_rows, rows.size(1))
        dist.all_gather_into_tensor(gathered, padded, group=encoders)
        return gathered

    @staticmethod
    def backward(ctx, grad):
        # Each user has only the gradient from its own tokens.
        if ctx.users.size() > 1 and grad.numel():
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.users)
        per_rank = len(grad) // ctx.encoders.size()
        first = ctx.encoders.rank() * per_rank
        return grad[first : first + ctx.count], None, None, None


def gather_rows(rows: torch.Tensor, gathered_rows: int, encoders: ProcessGroup, users: ProcessGroup) -> torch.Tensor:
    """Gather the rows of all `encoders` as (encoders * gathered_rows, D), each rank's padded to `gathered_rows`.

    The gradient of a row is the sum over the ranks that use it for different tokens (`users`). Tensor-parallel ranks
    that hold the same tokens are not users in this sense: each has the whole gradient already.

    Args:
        rows: (n, D), n at most `gathered_rows`; n may differ between ranks.
    """
    return _GatherRows.apply(rows, gathered_rows, encoders, users)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, group):
        ctx.group = group
        ctx.save_for_backward(order)
        gathered = x.new_empty(len(order), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        # Back in the ranks' order; each rank has only the gradient from its own queries or tokens.
        grad = grad.index_select(0, order)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None


def gather_sequence(x: torch.Tensor, order: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Gather (T / ranks, ...) of each context-parallel rank to (T, ...) in the bin's order; sum gradients over ranks.

    Args:
        order: (T,) indices of the bin's tokens, in the order in which the ranks hold them.
    """
    return _GatherSequence.apply(x, order, group)


def _exchange_for_heads(x: torch.Tensor, order: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    sent = x.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    received = received.flatten(0, 1)
    return torch.empty_like(received).index_copy_(0, order, received)


def _exchange_for_sequence(x: torch.Tensor, order: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    sent = x.index_select(0, order)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.unflatten(0, (group.size(), -1)).transpose(0, 1)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, group, exchange, inverse):
        ctx.save_for_backward(order)
        ctx.group, ctx.inverse = group, inverse
        return exchange(x, order, group)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return ctx.inverse(grad, order, ctx.group), None, None, None, None


def to_heads(x: torch.Tensor, order: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Exchange tokens for heads: (T / ranks, ranks, width) -> (T, width).

    The input is this rank's tokens with the values of each rank's heads. The output is all tokens in the bin's order,
    with the values of this rank's heads.
    """
    return _AllToAll.apply(x, order, group, _exchange_for_heads, _exchange_for_sequence)


def to_sequence(x: torch.Tensor, order: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Invert `to_heads`: (T, width) of this rank's heads -> (T / ranks, ranks, width) of this rank's tokens."""
    return _AllToAll.apply(x, order, group, _exchange_for_sequence, _exchange_for_heads)
