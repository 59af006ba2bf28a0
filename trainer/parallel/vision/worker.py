"""The worker's side of an exchange of image tokens, see exchange.py."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.data.micro_batch import MicroBatch
from trainer.libraries.torch_private import foreach_copy, foreach_zero
from trainer.parallel.vision.exchange import Encode, ExchangeSide, Links, Message, Window, warm_up_links
from trainer.parallel.vision.main_grads import add_to_main_grad, fuse_gradients


@dataclass(slots=True)
class _Open:
    """Image tokens that wait for their gradient."""

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
        self._is_first = tp is None or tp.rank() == 0
        self._open: deque[_Open] = deque()
        self._unsent: deque[tuple[int, torch.Tensor, int]] = deque()

    def prepare(self, device: torch.device) -> None:
        """See `ExchangeSide.prepare`; also moves the copy to the device and opens the connections."""
        self.part.to(device)
        super().prepare(device)
        fuse_gradients(self.part)
        self._weights = WholeParameters(self._params, self._params[0].dtype, self._tp)
        self._grads = WholeParameters(self.trained, torch.float32, self._tp)
        if self._tp is None:  # parameters and gradients are views of the exchanged tensors
            for param, place in zip(self._params, self._weights.own):
                param.data = place
        for param, place in zip(self.trained, self._grads.own):
            param.main_grad = place if self._tp is None else torch.zeros_like(place)
            param.grad_added_to_main_grad = False
            param.register_post_accumulate_grad_hook(add_to_main_grad)
        if self._is_first:
            warm_up_links(self._links, self._owners, device, is_owner=False)

    def get_weights(self) -> None:
        """Get the owner's weights, at the beginning of a step."""
        if moving := self._moving():
            self._receive(self._weights.numbers[: sum(self._weights.sizes[: len(moving)])], self._owners[0])
            if self._tp is not None:
                foreach_copy([param.detach() for param in moving], self._weights.own[: len(moving)])
        self.retire(math.inf)

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
                self._open.append(_Open(number, encoded, owner))

    def send_until(self, last: float) -> None:
        """Begin to send the tokens of this rank's images, up to and including those of micro batch `last`."""
        while self._unsent and self._unsent[0][0] <= last:
            self.send(*self._unsent.popleft(), self._links.to_owner)

    def expect_until(self, last: float) -> None:
        """Begin to receive the gradients of this rank's images, up to and including those of micro batch `last`."""
        for tokens in self._open:
            if tokens.number <= last and tokens.grad is None:
                tokens.grad = torch.empty_like(tokens.encoded)
                if self._is_first:
                    tokens.arrival = self._links.to_worker.recv([tokens.grad], tokens.owner, 0)

    def backward_until(self, last: float) -> None:
        """Run the backward pass of this rank's images, up to and including those of micro batch `last`."""
        self.expect_until(last)
        while self._open and self._open[0].number <= last:
            tokens = self._open.popleft()
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

    def say_whether_to_stop(self, should_stop: bool) -> None:
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
            self._join_gradients(self._tp)
        if self._is_first:
            self._links.to_owner.send([self._grads.numbers], self._owners[0], 0).wait()
        foreach_zero([param.main_grad for param in self.trained])

    def _join_gradients(self, tp: ProcessGroup) -> None:
        """Assemble whole gradients on the first tensor-parallel rank."""
        self._grads.numbers.zero_()
        parts = zip(self.trained, self._grads.own, self._grads.divided)
        # Undivided parameters have a gradient on every tensor-parallel rank; only the first rank's is taken.
        taken = [(param, grad) for param, grad, divided in parts if divided or self._is_first]
        foreach_copy([grad for _, grad in taken], [param.main_grad for param, _ in taken])
        dist.reduce(self._grads.numbers, group=tp, group_dst=0)


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
        self.get_weights()
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
                self.send_until(number + self._messages.ahead)
                self.expect_until(number - self._messages.behind)
                self.backward_until(number - self._window.behind)
                encode_next(number)
                self.retire(number)
                yield waiting.popleft()

        return in_order()


class WholeParameters:
    """One tensor with room for whole parameters, where this rank may hold only slices of some.

    Args:
        params: this rank's parameters, with the marks of `mark_tensor_parallel`.
        tp: ranks that divide the marked parameters; None: no parameter is divided.

    Attributes:
        numbers: the numbers of all whole parameters, one parameter after another.
        own: views of this rank's part of each parameter.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], dtype: torch.dtype, tp: ProcessGroup | None) -> None:
        self.divided = [tp is not None and getattr(param, "tensor_model_parallel", False) for param in params]
        shapes = [list(param.shape) for param in params]
        for param, shape, divided in zip(params, shapes, self.divided):
            if divided:
                shape[param.partition_dim] *= tp.size()
        self.sizes = [math.prod(shape) for shape in shapes]
        device = params[0].device if params else None
        self.numbers = torch.zeros(sum(self.sizes), dtype=dtype, device=device)
        wholes = [part.view(shape) for part, shape in zip(self.numbers.split(self.sizes), shapes)]
        self.own = [
            whole.chunk(tp.size(), param.partition_dim)[tp.rank()] if divided else whole
            for param, whole, divided in zip(params, wholes, self.divided)
        ]
