"""Image tokens that other ranks encode than those that use them, while the pipeline's schedule runs as ever.

A first pipeline rank owns the vision encoder: its optimizer, its part of a checkpoint. Workers encode with copies of
its weights, which they get at the beginning of every step, and give it their gradients at the end. Image tokens go from
a worker to the owner of the place in tensor and context parallel that it works for; gradients of image tokens go back.
Who encodes which image is a pure function of the bin: both sides know all sizes, and no message says them.

With `parallel.vision=dealt` the workers are the other ranks of the pipeline. Such a rank encodes its images of micro
batch i + `ahead` before it runs its layers on micro batch i, and learns from those of i - `behind`. It has hidden
states of i by then, so the owner has run i: that has ended the backward pass of i - `behind`, and has got the image
tokens of i. Hence no two ranks wait for each other, and a rank holds activations of `ahead` + `behind` + 1 micro
batches, of one P-th of their images each.

P = pipeline ranks, D = language hidden size, L = deepstack levels.
"""

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.data.micro_batch import MicroBatch
from trainer.parallel.runtime import fuse_gradients

Encode = Callable[[MicroBatch], torch.Tensor]  # -> (encoded_rows, (1 + L) * D)


@dataclass(frozen=True, slots=True)
class Links:
    """Two groups of the same ranks, one for each direction: the messages of one have an order, which those of the other
    would break. Numbers of ranks are the groups' own."""

    to_owner: ProcessGroup
    to_worker: ProcessGroup


class Window(NamedTuple):
    """Micro batches between the encoding of images and the pipeline's forward pass, and between that and the time when
    the backward pass of the first rank is known to have ended."""

    ahead: int
    behind: int

    @classmethod
    def of(cls, pp: int, vpp: int) -> "Window":
        """Of a pipeline. With virtual stages the first rank runs a group of pp micro batches more before it turns."""
        return cls(pp, pp * min(vpp, 2))


class _Sent(NamedTuple):
    number: int  # of the micro batch
    work: dist.Work
    rows: torch.Tensor  # kept until they have arrived


class _Side:
    """What both sides have: the encoder's parameters, and messages on their way."""

    def __init__(self, encoder: torch.nn.Module, links: Links) -> None:
        self.part = torch.nn.ModuleDict({"vision": encoder})  # parameters by their names in the model
        self._links = links
        self._sent: deque[_Sent] = deque()

    def prepare(self, device: torch.device) -> None:
        """Take what is trained, once it is known what is frozen."""
        self._device = device
        self._params = list(self.part.parameters())
        self.trained = [param for param in self._params if param.requires_grad]
        self._is_fresh = False

    def _send(self, number: int, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        self._sent.append(_Sent(number, group.send([rows], rank, 0), rows))

    def retire(self, last: float) -> None:
        """Let go of what has been sent, up to a micro batch of which it is known that it has arrived."""
        while self._sent and self._sent[0].number <= last:
            self._sent.popleft().work.wait()

    def _weights_move(self) -> bool:
        """Whether this step begins with the weights' way to the copies."""
        moves, self._is_fresh = bool(self.trained) or not self._is_fresh, True
        return moves


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


class VisionOwner(_Side):
    """A first pipeline rank.

    Args:
        encode: encodes the images of this rank; None: it has none.
        workers: ranks that encode for this one.
        width: (1 + L) * D.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        encode: Encode | None,
        links: Links,
        workers: Sequence[int],
        window: Window,
        width: int,
    ) -> None:
        super().__init__(encoder, links)
        self._encode, self._workers, self._window, self._width = encode, workers, window, width
        self._copies = workers

    def prepare(self, device: torch.device) -> None:
        """As of both sides; connects the two."""
        super().prepare(device)
        meet(self._links, self._workers, device, is_owner=True)

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """`count` micro batches, in order, with the image tokens of all ranks.

        The first ones are encoded at once, before the schedule makes a rank wait for the hidden states of another.
        """
        if self._weights_move():
            weights = torch._utils._flatten_dense_tensors([param.detach() for param in self._params])
            for work in [self._links.to_worker.send([weights], copy, 0) for copy in self._copies]:
                work.wait()
        self.retire(math.inf)
        coming = (self._with_own(batch) for batch in islice(batches, count))
        waiting = deque(islice(coming, self._window.ahead if self._encode else 0))

        def in_order() -> Iterator[MicroBatch]:
            for number in range(count):
                waiting.extend(islice(coming, 1))
                yield self._with_all(number, waiting.popleft())

        return in_order()

    def finish_backward(self) -> None:
        """Add the gradients of all copies. Called when the schedule has ended, before data-parallel ranks sum."""
        if self.trained:
            grads = [param.main_grad for param in self.trained]
            arrived = torch.empty(sum(grad.numel() for grad in grads), device=self._device)
            for copy in self._copies:
                self._links.to_owner.recv([arrived], copy, 0).wait()
                torch._foreach_add_(grads, torch._utils._unflatten_dense_tensors(arrived, grads))

    def _with_own(self, batch: MicroBatch) -> MicroBatch:
        if self._encode:
            return dataclasses.replace(batch, features=self._encode(batch))
        own = torch.empty(0, self._width, dtype=self._params[0].dtype, device=self._device)
        return dataclasses.replace(batch, features=own.requires_grad_(bool(self.trained)))

    def _with_all(self, number: int, batch: MicroBatch) -> MicroBatch:
        own, bounds = batch.features, [*accumulate(batch.arriving_rows, initial=0)]
        arrived = own.new_empty(bounds[-1], own.size(1))
        parts = [(w, start, stop) for w, (start, stop) in zip(self._workers, pairwise(bounds)) if stop > start]
        if not parts:
            return batch
        for work in [self._links.to_owner.recv([arrived[start:stop]], worker, 0) for worker, start, stop in parts]:
            work.wait()

        def send_back(grad: torch.Tensor) -> None:
            for worker, start, stop in parts:
                self._send(number, grad[start:stop], worker, self._links.to_worker)
            self.retire(number - self._window.behind)

        return dataclasses.replace(batch, features=_Joined.apply(own, arrived, send_back))


class Message(enum.IntEnum):
    """What an owner tells the ranks that encode images and do nothing else."""

    BEGIN = 0  # the training, at a step
    TRAIN = 1  # a step
    EVALUATE = 2  # the held-out bins
    END = 3  # the training; 1: it was stopped


class RemoteOwner(VisionOwner):
    """A first pipeline rank for which ranks encode that do nothing else. It tells them what comes next.

    Args:
        workers: as of its base.
        copies: those of them that get their weights from this rank and give it their gradients.

    Attributes:
        should_stop: one of them was told to stop.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        links: Links,
        workers: Sequence[int],
        copies: Sequence[int],
        window: Window,
        width: int,
    ) -> None:
        super().__init__(encoder, None, links, workers, window, width)
        self._copies, self.should_stop = copies, False

    def tell(self, message: Message, number: int = 0) -> None:
        """Say what comes next."""
        words = torch.tensor([message, number], device=self._device)
        for copy in self._copies:
            self._links.to_worker.send([words], copy, 0).wait()

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """As of its base."""
        self.tell(Message.TRAIN if torch.is_grad_enabled() else Message.EVALUATE)
        return super().encoded(batches, count)

    def finish_backward(self) -> None:
        """As of its base."""
        super().finish_backward()
        flag = torch.zeros(1, dtype=torch.int64, device=self._device)
        for copy in self._copies:
            self._links.to_owner.recv([flag], copy, 0).wait()
            self.should_stop |= bool(flag.item())


class _Open(NamedTuple):
    """Image tokens that wait for their gradient."""

    number: int  # of the micro batch
    encoded: torch.Tensor
    owner: int


class VisionWorker(_Side):
    """A rank that encodes for others with a copy of the encoder, which is no part of its model.

    Args:
        owners: ranks whose places it works for; from the first it gets the weights, and to it go the gradients.
        tp: ranks that share this copy's matrices, of which the first exchanges for all; None: it has them whole.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        encode: Encode,
        links: Links,
        owners: Sequence[int],
        tp: ProcessGroup | None = None,
    ) -> None:
        super().__init__(encoder, links)
        self._encode, self._owners, self._tp = encode, owners, tp
        self._is_first = tp is None or tp.rank() == 0
        self._open: deque[_Open] = deque()

    def prepare(self, device: torch.device) -> None:
        """As of both sides; gives the copy its place on the device and connects the two."""
        self.part.to(device)
        super().prepare(device)
        fuse_gradients(self.part)
        self._weights = WholeParameters(self._params, self._params[0].dtype, self._tp)
        self._grads = WholeParameters(self.trained, torch.float32, self._tp)
        for param, grad in zip(self.trained, self._grads.own):
            param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(grad), False
            param.register_post_accumulate_grad_hook(_add_to_main_grad)
        if self._is_first:
            meet(self._links, self._owners, device, is_owner=False)

    def get_weights(self) -> None:
        """The owner's weights, at the beginning of a step."""
        if self._weights_move():
            self._receive(self._weights.numbers, self._owners[0])
            torch._foreach_copy_([param.detach() for param in self._params], self._weights.own)
        self.retire(math.inf)

    def _receive(self, numbers: torch.Tensor, owner: int) -> None:
        if self._is_first:
            self._links.to_worker.recv([numbers], owner, 0).wait()
        if self._tp is not None:
            dist.broadcast(numbers, group=self._tp, group_src=0)

    def give(self, number: int, batch: MicroBatch, owner: int) -> None:
        """Encode this rank's images of a micro batch, and send their tokens to an owner."""
        if batch.encoded_rows:
            encoded = self._encode(batch)
            if self._is_first:
                self._send(number, encoded.detach(), owner, self._links.to_owner)
            if encoded.requires_grad:
                self._open.append(_Open(number, encoded, owner))

    def learn(self, last: float) -> None:
        """The backward pass of this rank's images, up to those of a micro batch."""
        while self._open and self._open[0].number <= last:
            _, encoded, owner = self._open.popleft()
            grad = torch.empty_like(encoded)
            self._receive(grad, owner)
            torch.autograd.backward(encoded, grad)

    def listen(self) -> tuple[Message, int]:
        """What comes next, as the owner says."""
        words = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._receive(words, self._owners[0])
        message, number = words.tolist()
        return Message(message), number

    def say_whether_to_stop(self, should_stop: bool) -> None:
        """After a step, whether this rank was told to stop."""
        flag = torch.tensor([int(should_stop)], device=self._device)
        if self._tp is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._tp)
        if self._is_first:
            self._links.to_owner.send([flag], self._owners[0], 0).wait()

    def finish_backward(self) -> None:
        """The rest of the backward pass, and the gradients to the owner. Called when the schedule has ended."""
        self.learn(math.inf)
        if not self.trained:
            return
        self._grads.numbers.zero_()
        parts = zip(self.trained, self._grads.own, self._grads.divided)
        # Of what every tensor-parallel rank has whole, the first one's is taken.
        taken = [(param, grad) for param, grad, divided in parts if divided or self._is_first]
        torch._foreach_copy_([grad for _, grad in taken], [param.main_grad for param, _ in taken])
        if self._tp is not None:
            dist.reduce(self._grads.numbers, group=self._tp, group_dst=0)
        if self._is_first:
            self._links.to_owner.send([self._grads.numbers], self._owners[0], 0).wait()
        torch._foreach_zero_([param.main_grad for param in self.trained])


class PipelineWorker(VisionWorker):
    """A later rank of a pipeline, beside its layers."""

    def __init__(
        self, encoder: torch.nn.Module, encode: Encode, links: Links, owners: Sequence[int], window: Window
    ) -> None:
        super().__init__(encoder, encode, links, owners)
        self._window = window

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """`count` micro batches, in order; their images are encoded when it is time."""
        self.get_weights()
        coming = enumerate(islice(batches, count))
        waiting: deque[MicroBatch] = deque()

        def encode_next() -> None:
            for number, batch in islice(coming, 1):
                self.give(number, batch, self._owners[0])
                waiting.append(batch)

        for _ in range(self._window.ahead):
            encode_next()

        def in_order() -> Iterator[MicroBatch]:
            for number in range(count):
                self.learn(number - self._window.behind)
                encode_next()
                self.retire(number)
                yield waiting.popleft()

        return in_order()


def pipeline_links(pp: ProcessGroup) -> Links:
    """Between the ranks of a pipeline; a collective of the world, in which every pipeline makes its own."""
    pipelines = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, dist.get_process_group_ranks(pp))
    each = [list(ranks) for ranks in sorted(set(map(tuple, pipelines)))]
    return Links(*(dist.new_subgroups_by_enumeration(each)[0] for _ in range(2)))


def meet(links: Links, others: Sequence[int], device: torch.device, *, is_owner: bool) -> None:
    """Exchange a number both ways: NCCL connects two ranks at their first message, for which both must be there, and in
    a step they are not at the same time."""
    number = torch.zeros(1, device=device)
    for other in others:
        for group, sends in ((links.to_owner, not is_owner), (links.to_worker, is_owner)):
            (group.send if sends else group.recv)([number], other, 0).wait()


class WholeParameters:
    """Room for whole parameters in one tensor, of which this rank may have slices.

    Args:
        params: this rank's, with the marks of `mark_tensor_parallel`.
        tp: ranks that divide those with marks; None: nothing is divided.

    Attributes:
        numbers: of all parameters, one after another.
        own: this rank's of each parameter, as views.
        divided: of each parameter whether this rank has a slice of it.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], dtype: torch.dtype, tp: ProcessGroup | None) -> None:
        self.divided = [tp is not None and getattr(param, "tensor_model_parallel", False) for param in params]
        shapes = [list(param.shape) for param in params]
        for param, shape, divided in zip(params, shapes, self.divided):
            if divided:
                shape[param.partition_dim] *= tp.size()
        sizes = [math.prod(shape) for shape in shapes]
        device = params[0].device if params else None
        self.numbers = torch.zeros(sum(sizes), dtype=dtype, device=device)
        wholes = [part.view(shape) for part, shape in zip(self.numbers.split(sizes), shapes)]
        self.own = [
            whole.chunk(tp.size(), param.partition_dim)[tp.rank()] if divided else whole
            for param, whole, divided in zip(params, wholes, self.divided)
        ]


def _add_to_main_grad(param: torch.nn.Parameter) -> None:
    """As megatron-core's data parallelism does: a product may have added to it already."""
    if not param.grad_added_to_main_grad:
        param.main_grad.add_(param.grad)
    param.grad = None
