"""Collectives with exact gradients: rows gathered from ranks that hold different numbers of them, and whole sequences
gathered from context-parallel slices."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, gathered_rows, encoders, users):
        ctx.encoders, ctx.users, ctx.count = encoders, users, len(rows)
        padded = rows.new_zeros(gathered_rows, rows.size(1))
        padded[: len(rows)] = rows
        if encoders.size() == 1:
            return padded
        gathered = rows.new_empty(encoders.size() * gathered_rows, rows.size(1))
        dist.all_gather_into_tensor(gathered, padded, group=encoders)
        return gathered

    @staticmethod
    def backward(ctx, grad):
        if ctx.users.size() > 1 and grad.numel():
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.users)
        per_rank = len(grad) // ctx.encoders.size()
        first = ctx.encoders.rank() * per_rank
        return grad[first : first + ctx.count], None, None, None


def gather_rows(rows: torch.Tensor, gathered_rows: int, encoders: ProcessGroup, users: ProcessGroup) -> torch.Tensor:
    """(encoders * gathered_rows, D): the rows of all `encoders`, rank after rank, each filled up to `gathered_rows`.

    The gradient of a row is the sum over the ranks that use it for different tokens (`users`). Tensor-parallel ranks
    that hold the same tokens are not users in this sense: each has the whole gradient already.

    Args:
        rows: (n, D), n at most `gathered_rows`; each rank may have another n.
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
        grad = grad.index_select(0, order)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None


def gather_sequence(x: torch.Tensor, order: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(T / ranks, ...) of each context-parallel rank -> (T, ...) in the bin's order; gradients are summed over ranks.

    Args:
        order: (T,) places of the bin in the order in which the ranks hold them.
    """
    return _GatherSequence.apply(x, order, group)
