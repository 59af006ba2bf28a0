"""The exchange of image tokens between ranks that encode images and ranks that use the tokens.

The pipeline's schedule is unchanged. A first pipeline rank is the owner of the vision encoder: of its optimizer and its
part of a checkpoint. Workers encode with copies of the owner's weights, which they get at the beginning of every step,
and send their gradients at the end. Each worker serves one index in tensor and context parallel: it sends image tokens
to the owner with this index, and the owner sends their gradients back. The assignment of images to ranks is a pure
function of the bin, so that both sides know all sizes without a message.

With `parallel.vision=dealt` the workers are the later ranks of the pipeline. Before such a rank runs its layers on
micro batch i, it encodes its images of micro batch i + `ahead` and runs the backward pass of its images of
i - `behind`. At that time it has the hidden states of i, so the owner has run i: the owner has ended the backward pass
of i - `behind`, and has received the image tokens of i. Hence no two ranks wait for each other, and a rank holds
activations of `ahead` + `behind` + 1 micro batches, for one P-th of the images of each.

A message occupies the device of its first side until the other side takes part, and some calls of CUDA wait for the
whole device: the first call of a kernel, or memory that is given back. So no message may be under way whose other side
needs this rank again. Before its forward pass of i, rank r has the hidden states of i, and has run the backward pass of
i + r - P. At that time

- it begins to send image tokens up to i + r, which the owner takes in its forward pass of i + r, after its backward
  pass of i + r - P; before the first forward pass it may send only those up to r - 1;
- it begins to receive the gradients up to i + r - P, which the owner sends in that backward pass.

P = pipeline ranks, D = language hidden size, L = deepstack levels.

The file has the parts that both sides share, then the owner's side (`VisionOwner`, `RemoteOwner`), then the worker's
(`VisionWorker`, `PipelineWorker`).
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
from trainer.libraries.torch_private import flatten_together, foreach_add, foreach_copy, foreach_zero, views_of_flat
from trainer.parallel.vision.main_grads import add_to_main_grad, fuse_gradients

Encode = Callable[[MicroBatch], torch.Tensor]  # -> (encoded_rows, (1 + L) * D)


@dataclass(frozen=True, slots=True)
class Links:
    """Two groups of the same ranks, one for each direction, because messages in a group are ordered and the two
    directions have independent orders. Ranks are numbered within the groups."""

    to_owner: ProcessGroup
    to_worker: ProcessGroup
    pipeline: ProcessGroup | None = None  # the group of the pipeline's own messages, if these ranks are a pipeline


class Window(NamedTuple):
    """The numbers of micro batches by which a worker runs ahead of and behind the pipeline's forward pass."""

    ahead: int  # from the encoding of images to the forward pass
    behind: int  # from the forward pass to the time when the first rank's backward pass is known to have ended

    @classmethod
    def of(cls, pp: int, vpp: int) -> "Window":
        """Return the window of a pipeline."""
        # With virtual stages the first rank runs pp more micro batches forward before its first backward pass.
        return cls(pp, pp * min(vpp, 2))

    @classmethod
    def of_messages(cls, pp: int, vpp: int, rank: int) -> "Window":
        """Return when a pipeline rank sends tokens and begins to receive gradients, see the text above. With virtual
        stages this is when it encodes and runs the backward pass."""
        return cls(rank, pp - rank) if vpp == 1 else cls.of(pp, vpp)


class Message(enum.IntEnum):
    """A message from an owner to the ranks that encode images and do nothing else."""

    BEGIN = 0  # begin the training; the number is the step
    TRAIN = 1  # train one step
    EVALUATE = 2  # encode the held-out bins
    END = 3  # end the training; number 1: it was stopped


class _Sent(NamedTuple):
    """A message that may still be under way."""

    number: int  # index of the micro batch
    work: dist.Work
    rows: torch.Tensor  # kept alive until they have arrived


class ExchangeSide:
    """The common part of both sides: the encoder's parameters, and unfinished messages."""

    def __init__(self, encoder: torch.nn.Module, links: Links) -> None:
        self.part = torch.nn.ModuleDict({"vision": encoder})  # parameters by their names in the model
        self._links = links
        self._sent: deque[_Sent] = deque()

    def prepare(self, device: torch.device) -> None:
        """Collect the parameters; call it after parts were frozen."""
        self._device = device
        # Trained parameters come first, because only they are sent again at every step.
        self._params = sorted(self.part.parameters(), key=lambda param: not param.requires_grad)
        self.trained = [param for param in self._params if param.requires_grad]
        self._have_all_been_sent = False

    def send(self, number: int, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        self._sent.append(_Sent(number, group.send([rows], rank, 0), rows))

    def release_sent(self, last: float) -> None:
        """Release sent messages up to and including micro batch `last`, which is known to have arrived: `wait` returns
        at once then, and the memory of the rows is free."""
        while self._sent and self._sent[0].number <= last:
            self._sent.popleft().work.wait()

    def _params_to_send(self) -> list[torch.nn.Parameter]:
        """Return the parameters to send to the copies at the start of this step: at first all, later the trained. Both
        sides call it once a step, and so agree on the size of the message."""
        if self._have_all_been_sent:
            return self.trained
        self._have_all_been_sent = True
        return self._params


def pipeline_links(pp: ProcessGroup) -> Links:
    """Make the links between the ranks of each pipeline; a collective of the world."""
    pipelines = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, dist.get_process_group_ranks(pp))
    each = [list(ranks) for ranks in sorted(set(map(tuple, pipelines)))]
    # All ranks make all groups. With use_local_synchronization ranks hung, because a group's name depends on how many
    # groups a rank has.
    return Links(*(dist.new_subgroups_by_enumeration(each)[0] for _ in range(2)), pp)


def warm_up_links(links: Links, others: Sequence[int], device: torch.device, *, is_owner: bool) -> None:
    """Exchange a number in both directions, and between neighbours of the pipeline.

    NCCL connects two ranks at their first message, for which both must wait, and during a step they do not send and
    receive at the same time. The pipeline's first message would be sent while image tokens are on their way.
    """
    number = torch.zeros(1, device=device)
    for other in others:
        for group, sends in ((links.to_owner, not is_owner), (links.to_worker, is_owner)):
            (group.send if sends else group.recv)([number], other, 0).wait()
    if links.pipeline is None:
        return
    # To the next rank and to the previous one, as megatron-core's schedule sends: in batches.
    ranks, here = dist.get_process_group_ranks(links.pipeline), links.pipeline.rank()
    for step in (1, -1):
        after, before = (ranks[(here + way) % len(ranks)] for way in (step, -step))
        send = dist.P2POp(dist.isend, number, after, links.pipeline)
        receive = dist.P2POp(dist.irecv, torch.empty_like(number), before, links.pipeline)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()


class _JoinedTokens(torch.autograd.Function):
    """This rank's rows, followed by the received rows, whose gradient is sent back in backward."""

    @staticmethod
    def forward(ctx, own, arrived, send_back):
        ctx.num_own, ctx.send_back = len(own), send_back
        return torch.cat([own, arrived])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        ctx.send_back(grad[ctx.num_own :])
        return grad[: ctx.num_own], None, None


class VisionOwner(ExchangeSide):
    """A first pipeline rank, which owns the encoder's weights and gets image tokens from workers.

    Args:
        encode: encodes the images of this rank; None: this rank encodes no images.
        workers: ranks that encode for this one.
        width: numbers of an image token's features, (1 + L) * D.
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
        super().prepare(device)
        warm_up_links(self._links, self._workers, device, is_owner=True)

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """Return `count` micro batches, in order, with the image tokens of all ranks."""
        # Of an encoder that is frozen whole, the copies get the weights once.
        if sent := self._params_to_send():
            weights = flatten_together([param.detach() for param in sent])
            for work in [self._links.to_worker.send([weights], copy, 0) for copy in self._copies]:
                work.wait()
        # The workers have returned the last step's gradients of the weights, so all that was sent to them has arrived.
        self.release_sent(math.inf)
        # islice: `batches` goes on with the bins of the next step, which must not be read here.
        coming = (self._encode_own(batch) for batch in islice(batches, count))
        # The first are encoded at once, before the schedule makes a rank wait for another rank's hidden states.
        waiting = deque(islice(coming, self._window.ahead if self._encode else 0))

        def in_order() -> Iterator[MicroBatch]:
            for number in range(count):
                waiting.extend(islice(coming, 1))
                yield self._add_arrived(number, waiting.popleft())

        return in_order()

    def finish_backward(self) -> None:
        """Add the gradients of all copies. Called when the schedule has ended, before the data-parallel sum."""
        if self.trained:
            grads = [param.main_grad for param in self.trained]
            # float32, as `main_grad` is: a copy sends its sums unrounded.
            arrived = torch.empty(sum(grad.numel() for grad in grads), device=self._device)
            for copy in self._copies:
                self._links.to_owner.recv([arrived], copy, 0).wait()
                foreach_add(grads, views_of_flat(arrived, grads))

    def _encode_own(self, batch: MicroBatch) -> MicroBatch:
        if self._encode:
            return dataclasses.replace(batch, features=self._encode(batch))
        own = torch.empty(0, self._width, dtype=self._params[0].dtype, device=self._device)
        # Without an input that requires a gradient, autograd would not call `_JoinedTokens.backward`, which sends the
        # gradients back.
        return dataclasses.replace(batch, features=own.requires_grad_(bool(self.trained)))

    def _add_arrived(self, number: int, batch: MicroBatch) -> MicroBatch:
        own, bounds = batch.features, [*accumulate(batch.arriving_rows, initial=0)]
        arrived = own.new_empty(bounds[-1], own.size(1))
        parts = [(w, start, stop) for w, (start, stop) in zip(self._workers, pairwise(bounds)) if stop > start]
        if not parts:
            return batch
        for work in [self._links.to_owner.recv([arrived[start:stop]], worker, 0) for worker, start, stop in parts]:
            work.wait()

        def send_back(grad: torch.Tensor) -> None:
            for worker, start, stop in parts:
                self.send(number, grad[start:stop], worker, self._links.to_worker)
            self.release_sent(number - self._window.behind)

        return dataclasses.replace(batch, features=_JoinedTokens.apply(own, arrived, send_back))


class RemoteOwner(VisionOwner):
    """A first pipeline rank whose workers do nothing but encode images. It tells them what to do next.

    Args:
        copies: workers that get their weights from this rank and send it their gradients.
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
        self._copies, self.should_stop = copies, False  # should_stop: whether a worker was told to stop

    def tell(self, message: Message, number: int = 0) -> None:
        words = torch.tensor([message, number], device=self._device)
        for copy in self._copies:
            self._links.to_worker.send([words], copy, 0).wait()

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """See `VisionOwner.encoded`; also tells the workers to train or to evaluate."""
        self.tell(Message.TRAIN if torch.is_grad_enabled() else Message.EVALUATE)
        return super().encoded(batches, count)

    def finish_backward(self) -> None:
        """See `VisionOwner.finish_backward`; also asks the workers whether to stop."""
        super().finish_backward()
        flag = torch.zeros(1, dtype=torch.int64, device=self._device)
        for copy in self._copies:
            self._links.to_owner.recv([flag], copy, 0).wait()
            self.should_stop |= bool(flag.item())


@dataclass(slots=True)
class _Awaited:
    """Image tokens that this rank has encoded and whose gradient it awaits."""

    number: int  # index of the micro batch
    encoded: torch.Tensor
    owner: int
    grad: torch.Tensor | None = None  # where it arrives, as soon as it is expected
    arrival: dist.Work | None = None


class VisionWorker(ExchangeSide):
    """A rank that encodes for other ranks, with a copy of the encoder that is not part of its own model.

    Args:
        owners: ranks that use the image tokens. The first of them sends the weights and gets the gradients.
        tp: ranks that share this copy's matrices, whose first rank exchanges for all; None: this rank has them whole.
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
        # Links connect only the first of the ranks that share a copy; it broadcasts to the others.
        self._is_first = tp is None or tp.rank() == 0
        self._awaited: deque[_Awaited] = deque()
        self._unsent: deque[tuple[int, torch.Tensor, int]] = deque()

    def prepare(self, device: torch.device) -> None:
        """See `ExchangeSide.prepare`; also moves the copy to the device and opens the connections."""
        self.part.to(device)
        super().prepare(device)
        fuse_gradients(self.part)
        self._weights = FlatParameters(self._params, self._params[0].dtype, self._tp)
        self._grads = FlatParameters(self.trained, torch.float32, self._tp)
        if self._tp is None:  # parameters and gradients are views of the exchanged tensors
            for param, place in zip(self._params, self._weights.shards):
                param.data = place
        for param, place in zip(self.trained, self._grads.shards):
            param.main_grad = place if self._tp is None else torch.zeros_like(place)
            param.grad_added_to_main_grad = False
            param.register_post_accumulate_grad_hook(add_to_main_grad)
        if self._is_first:
            warm_up_links(self._links, self._owners, device, is_owner=False)

    def receive_weights(self) -> None:
        """Get the owner's weights, at the beginning of a step."""
        if sent := self._params_to_send():
            # Trained parameters come first in the flat tensor, so those that are sent are its beginning.
            self._receive(self._weights.flat[: sum(self._weights.sizes[: len(sent)])], self._owners[0])
            if self._tp is not None:  # otherwise the parameters are views of the flat tensor
                foreach_copy([param.detach() for param in sent], self._weights.shards[: len(sent)])
        self.release_sent(math.inf)

    def _receive(self, numbers: torch.Tensor, owner: int) -> None:
        if self._is_first:
            self._links.to_worker.recv([numbers], owner, 0).wait()
        if self._tp is not None:
            dist.broadcast(numbers, group=self._tp, group_src=0)

    def encode(self, number: int, batch: MicroBatch, owner: int) -> None:
        """Encode this rank's images of a micro batch, for an owner."""
        if batch.encoded_rows:
            encoded = self._encode(batch)
            if self._is_first:
                self._unsent.append((number, encoded.detach(), owner))
            if encoded.requires_grad:
                self._awaited.append(_Awaited(number, encoded, owner))

    def send_until(self, last: float) -> None:
        """Begin to send the tokens of this rank's images, up to and including those of micro batch `last`."""
        while self._unsent and self._unsent[0][0] <= last:
            self.send(*self._unsent.popleft(), self._links.to_owner)

    def expect_until(self, last: float) -> None:
        """Begin to receive the gradients of this rank's images, up to and including those of micro batch `last`."""
        for tokens in self._awaited:
            if tokens.number <= last and tokens.grad is None:
                tokens.grad = torch.empty_like(tokens.encoded)
                if self._is_first:
                    tokens.arrival = self._links.to_worker.recv([tokens.grad], tokens.owner, 0)

    def backward_until(self, last: float) -> None:
        """Run the backward pass of this rank's images, up to and including those of micro batch `last`."""
        self.expect_until(last)
        while self._awaited and self._awaited[0].number <= last:
            tokens = self._awaited.popleft()
            if self._is_first:
                tokens.arrival.wait()
            if self._tp is not None:
                dist.broadcast(tokens.grad, group=self._tp, group_src=0)
            torch.autograd.backward(tokens.encoded, tokens.grad)

    def receive_command(self) -> tuple[Message, int]:
        """Receive the owner's next message and its number."""
        words = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._receive(words, self._owners[0])
        message, number = words.tolist()
        return Message(message), number

    def send_stop_flag(self, should_stop: bool) -> None:
        """Tell the owner, after a step, whether this rank was told to stop."""
        flag = torch.tensor([int(should_stop)], device=self._device)
        if self._tp is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._tp)
        if self._is_first:
            self._links.to_owner.send([flag], self._owners[0], 0).wait()

    def finish_backward(self) -> None:
        """Run the rest of the backward pass and send the gradients to the owner. Called when the schedule has ended."""
        self.backward_until(math.inf)
        if not self.trained:
            return
        if self._tp is not None:
            self._gather_gradients(self._tp)
        if self._is_first:
            self._links.to_owner.send([self._grads.flat], self._owners[0], 0).wait()
        # A copy has no optimizer whose `zero_grad` would do it.
        foreach_zero([param.main_grad for param in self.trained])

    def _gather_gradients(self, tp: ProcessGroup) -> None:
        """Join the shards of the gradients to whole ones on the first tensor-parallel rank."""
        self._grads.flat.zero_()
        parts = zip(self.trained, self._grads.shards, self._grads.divided)
        # Undivided parameters have a gradient on every tensor-parallel rank; only the first rank's is taken.
        taken = [(param, grad) for param, grad, divided in parts if divided or self._is_first]
        foreach_copy([grad for _, grad in taken], [param.main_grad for param, _ in taken])
        dist.reduce(self._grads.flat, group=tp, group_dst=0)


class PipelineWorker(VisionWorker):
    """A later pipeline rank, which encodes images in addition to running its layers.

    Args:
        window: when this rank encodes, and when it runs the backward pass of its images.
        messages: when it sends image tokens, and when it begins to receive their gradients, see `Window.of_messages`.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        encode: Encode,
        links: Links,
        owners: Sequence[int],
        window: Window,
        messages: Window,
    ) -> None:
        super().__init__(encoder, encode, links, owners)
        self._window, self._messages = window, messages

    def encoded(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """Return `count` micro batches, in order; their images are encoded ahead, as the window allows."""
        self.receive_weights()
        coming = enumerate(islice(batches, count))
        waiting: deque[MicroBatch] = deque()

        def encode_next(forward: int) -> None:
            for number, batch in islice(coming, 1):
                self.encode(number, batch, self._owners[0])
                waiting.append(batch)
            self.send_until(forward + self._messages.ahead)

        for _ in range(self._window.ahead):
            encode_next(-1)  # no forward pass has begun

        def in_order() -> Iterator[MicroBatch]:
            for number in range(count):
                # The generator stands here just before this rank's forward pass of `number`, when it has the hidden
                # states of the previous rank. First messages, then work that may make CUDA wait for the whole device.
                self.send_until(number + self._messages.ahead)
                self.expect_until(number - self._messages.behind)
                self.backward_until(number - self._window.behind)
                encode_next(number)
                self.release_sent(number)
                yield waiting.popleft()

        return in_order()


class FlatParameters:
    """One flat tensor with room for whole parameters, of some of which this rank may hold only a shard.

    Args:
        params: this rank's parameters, with the marks of `mark_tensor_parallel`.
        tp: ranks that divide the marked parameters; None: no parameter is divided.

    Attributes:
        flat: the numbers of all whole parameters, one parameter after another.
        sizes: numbers of each whole parameter.
        shards: views of this rank's part of each parameter.
        divided: for each parameter whether the ranks divide it.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], dtype: torch.dtype, tp: ProcessGroup | None) -> None:
        self.divided = [tp is not None and getattr(param, "tensor_model_parallel", False) for param in params]
        shapes = [list(param.shape) for param in params]
        for param, shape, divided in zip(params, shapes, self.divided):
            if divided:
                shape[param.partition_dim] *= tp.size()
        self.sizes = [math.prod(shape) for shape in shapes]
        device = params[0].device if params else None
        self.flat = torch.zeros(sum(self.sizes), dtype=dtype, device=device)
        wholes = [part.view(shape) for part, shape in zip(self.flat.split(self.sizes), shapes)]
        self.shards = [
            whole.chunk(tp.size(), param.partition_dim)[tp.rank()] if divided else whole
            for param, whole, divided in zip(params, wholes, self.divided)
        ]
