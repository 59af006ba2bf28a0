"""The exchange of rows between expert-parallel ranks: each rank holds some of the experts.

R = rows of this rank's tokens, one for each token and each of its experts; G = rows that this rank computes;
E = experts; k = experts per token; D = hidden size.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.parts.experts.products import Order


class ToRanks(torch.autograd.Function):
    """Rows sent to ranks and received from ranks: (sum of `send`, D) -> (sum of `receive`, D).

    The gradient takes the opposite way.
    """

    @staticmethod
    def forward(ctx, rows, send: Sequence[int], receive: Sequence[int], group: ProcessGroup):
        """Args: send, receive: number of rows to and from each rank."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _sent(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _sent(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _sent(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    received = rows.new_empty(sum(receive), rows.size(1))
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


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
    rows = ToRanks.apply(order.dispatch(hidden)[: sum(send)], send, receive, group)
    own = torch.arange(experts // ranks, device=rows.device).repeat(ranks)
    by_expert = own.repeat_interleave(arriving.flatten(), output_size=sum(receive)).argsort(stable=True)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(by_expert), device=rows.device)
    ends = arriving.sum(0).cumsum(0, dtype=torch.int32)
    out = compute(rows.index_select(0, by_expert), ends).index_select(0, back)
    out = ToRanks.apply(out, receive, send, group)
    # A row whose expert is not below E, such as a row of padding, is sent nowhere and has the output zero.
    nowhere = out.new_zeros(order.order.numel() - len(out), out.size(1))
    return order.collect(torch.cat([out, nowhere]))
