"""The images of a bin encoded by every rank of a pipeline (`parallel.vision=dealt`), while the schedule runs as ever.

The first pipeline rank owns the vision encoder: its optimizer, its part of a checkpoint. The others encode with copies
of its weights, which they get at the beginning of every step, and give it their gradients at the end. Image tokens go
from each rank to the first one of its place in tensor and context parallel, gradients of image tokens back. Who encodes
which image is a pure function of the bin: both sides know all sizes, and no message says them.

A rank encodes its images of micro batch i + `ahead` before it runs its layers on micro batch i, and learns from those
of i - `behind`. It has hidden states of i by then, so the first rank has run i: that has ended the backward pass of
i - `behind`, and has got the image tokens of i. Hence no two ranks wait for each other, and a rank holds activations of
`ahead` + `behind` + 1 micro batches, of one P-th of their images each.

P = pipeline ranks, D = language hidden size, L = deepstack levels.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.data.micro_batch import MicroBatch
from trainer.parallel.runtime import fuse_gradients

Encode = Callable[[MicroBatch], torch.Tensor]  # -> (encoded_rows, (1 + L) * D)


class _Sent(NamedTuple):
    number: int  # of the micro batch
    work: dist.Work
    rows: torch.Tensor  # kept until they have arrived


class _Open(NamedTuple):
    """Image tokens that wait for their gradient."""

    number: int
    encoded: torch.Tensor


class _Joined(torch.autograd.Function):
    """Rows of this rank, and after them those that have arrived, whose gradient is sent back."""

    @staticmethod
    def forward(ctx, own, arrived, send_back):
        ctx.num_own, ctx.send_back = len(own), send_back
        return torch.cat([own, arrived])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        ctx.send_back(grad[ctx.num_own :])
        return grad[: ctx.num_own], None, None


class DealtVision:
    """One rank's part in it.

    Args:
        encoder: the model's own on the first pipeline rank; a copy, which is no part of the model, on the others.
        encode: encodes with it.
        pp: the pipeline's ranks.
        vpp: virtual pipeline stages.
    """

    def __init__(self, encoder: torch.nn.Module, encode: Encode, pp: ProcessGroup, vpp: int) -> None:
        self.part = torch.nn.ModuleDict({"vision": encoder})  # parameters by their names in the model
        self._encode, self._pp = encode, pp
        self.is_owner = pp.rank() == 0
        self.ahead, self.behind = pp.size(), pp.size() * min(vpp, 2)
        self._ranks = dist.get_process_group_ranks(pp)
        # A group for each direction: the messages of one have an order, which those of the other would break.
        self._to_owner, self._from_owner = (_group_like(pp) for _ in range(2))
        self._open: deque[_Open] = deque()
        self._sent: deque[_Sent] = deque()
        self._is_fresh = False

    def prepare(self, device: torch.device) -> None:
        """Give the copies their places on the device, once it is known what is frozen; a collective."""
        self.part.to(device)
        self._params = list(self.part.parameters())
        self._trained = [param for param in self._params if param.requires_grad]
        if not self.is_owner:
            fuse_gradients(self.part)
            self._weights = _in_one(self._params)
            self._grads = torch.zeros(sum(p.numel() for p in self._trained), dtype=torch.float32, device=device)
            for param, grad in zip(self._trained, self._grads.split([p.numel() for p in self._trained])):
                param.main_grad, param.grad_added_to_main_grad = grad.view_as(param), False
                param.register_post_accumulate_grad_hook(_add_to_main_grad)
        self._meet(device)

    def _meet(self, device: torch.device) -> None:
        """Exchange a number in both groups: NCCL connects two ranks at their first message, for which both must be
        there, and in a step they are not at the same time."""
        number = torch.zeros(1, device=device)
        for other in self._ranks[1:] if self.is_owner else self._ranks[:1]:
            for group, sends in ((self._to_owner, not self.is_owner), (self._from_owner, self.is_owner)):
                (dist.send if sends else dist.recv)(number, other, group=group)

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """`count` micro batches, in order; on the first rank with the image tokens that all ranks have encoded.

        The first ones are encoded at once, before the schedule makes a rank wait for the hidden states of another.
        """
        self._share_weights()
        self._retire(math.inf)
        coming = (self._with_own(number, batch) for number, batch in enumerate(islice(batches, count)))
        waiting = deque(islice(coming, self.ahead))
        return self._as_the_schedule_asks(coming, waiting, count)

    def _as_the_schedule_asks(
        self, coming: Iterator[MicroBatch], waiting: deque[MicroBatch], count: int
    ) -> Iterator[MicroBatch]:
        for number in range(count):
            self._learn(number - self.behind)
            waiting.extend(islice(coming, 1))
            batch = waiting.popleft()
            if self.is_owner:
                yield self._with_all(number, batch)
            else:
                self._retire(number)
                yield batch

    def finish_backward(self) -> None:
        """The rest of the backward pass, and all gradients to the first rank; a collective. Called when the schedule
        has ended and before data-parallel ranks sum theirs."""
        self._learn(math.inf)
        if self._trained:
            self._sum_gradients()

    def _with_own(self, number: int, batch: MicroBatch) -> MicroBatch:
        """The micro batch with its images of this rank encoded, and on the way to the first rank."""
        if self.is_owner:
            return dataclasses.replace(batch, features=self._encode(batch))
        if batch.encoded_rows:
            encoded = self._encode(batch)
            self._send(number, encoded.detach(), self._ranks[0], self._to_owner)
            if encoded.requires_grad:
                self._open.append(_Open(number, encoded))
        return batch

    def _with_all(self, number: int, batch: MicroBatch) -> MicroBatch:
        own, bounds = batch.features, [*accumulate(batch.stage_rows[1:], initial=0)]
        if not bounds[-1]:
            return batch
        arrived = own.new_empty(bounds[-1], own.size(1))
        from_ranks = list(zip(self._ranks[1:], pairwise(bounds)))
        receiving = [
            dist.irecv(arrived[start:stop], rank, group=self._to_owner)
            for rank, (start, stop) in from_ranks
            if stop > start
        ]
        for work in receiving:
            work.wait()

        def send_back(grad: torch.Tensor) -> None:
            for rank, (start, stop) in from_ranks:
                if stop > start:
                    self._send(number, grad[start:stop], rank, self._from_owner)
            self._retire(number - self.behind)

        return dataclasses.replace(batch, features=_Joined.apply(own, arrived, send_back))

    def _learn(self, last: float) -> None:
        """The backward pass of this rank's images, up to those of a micro batch."""
        while self._open and self._open[0].number <= last:
            encoded = self._open.popleft().encoded
            grad = torch.empty_like(encoded)
            dist.irecv(grad, self._ranks[0], group=self._from_owner).wait()
            torch.autograd.backward(encoded, grad)

    def _send(self, number: int, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        self._sent.append(_Sent(number, dist.isend(rows, rank, group=group), rows))

    def _retire(self, last: float) -> None:
        """Let go of what has been sent, up to a micro batch of which it is known that it has arrived."""
        while self._sent and self._sent[0].number <= last:
            self._sent.popleft().work.wait()

    def _share_weights(self) -> None:
        """The first rank's weights to the copies."""
        if self._is_fresh and not self._trained:
            return
        weights = torch._utils._flatten_dense_tensors(self._params) if self.is_owner else self._weights
        dist.broadcast(weights.detach(), self._ranks[0], group=self._pp)
        self._is_fresh = True

    def _sum_gradients(self) -> None:
        """The gradients of all copies, summed in those of the first rank."""
        if not self.is_owner:
            dist.reduce(self._grads, self._ranks[0], group=self._pp)
            self._grads.zero_()
            return
        grads = [param.main_grad for param in self._trained]
        total = torch._utils._flatten_dense_tensors(grads)
        dist.reduce(total, self._ranks[0], group=self._pp)
        torch._foreach_copy_(grads, torch._utils._unflatten_dense_tensors(total, grads))


def _group_like(pp: ProcessGroup) -> ProcessGroup:
    """Another group of the same ranks; a collective of the world, in which every pipeline makes one."""
    pipelines = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, dist.get_process_group_ranks(pp))
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sorted(set(map(tuple, pipelines)))])
    return group


def _in_one(params: list[torch.nn.Parameter]) -> torch.Tensor:
    """One tensor that has all parameters in it from now on."""
    whole = torch._utils._flatten_dense_tensors([param.detach() for param in params])
    for param, place in zip(params, whole.split([param.numel() for param in params])):
        param.data = place.view_as(param)
    return whole


def _add_to_main_grad(param: torch.nn.Parameter) -> None:
    """As megatron-core's data parallelism does: a product may have added to it already."""
    if not param.grad_added_to_main_grad:
        param.main_grad.add_(param.grad)
    param.grad = None
