"""The owner's side of an exchange of image tokens, see exchange.py."""

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

import torch

from trainer.data.micro_batch import MicroBatch
from trainer.libraries.torch_private import flatten_together, foreach_add, views_of_flat
from trainer.parallel.vision.exchange import Encode, ExchangeSide, Links, Message, Window, warm_up_links


class _Joined(torch.autograd.Function):
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
        if moving := self._moving():
            weights = flatten_together([param.detach() for param in moving])
            for work in [self._links.to_worker.send([weights], copy, 0) for copy in self._copies]:
                work.wait()
        # The workers have returned the last step's gradients of the weights, so all that was sent to them has arrived.
        self.retire(math.inf)
        coming = (self._with_own(batch) for batch in islice(batches, count))
        # The first are encoded at once, before the schedule makes a rank wait for another rank's hidden states.
        waiting = deque(islice(coming, self._window.ahead if self._encode else 0))

        def in_order() -> Iterator[MicroBatch]:
            for number in range(count):
                waiting.extend(islice(coming, 1))
                yield self._with_all(number, waiting.popleft())

        return in_order()

    def finish_backward(self) -> None:
        """Add the gradients of all copies. Called when the schedule has ended, before the data-parallel sum."""
        if self.trained:
            grads = [param.main_grad for param in self.trained]
            arrived = torch.empty(sum(grad.numel() for grad in grads), device=self._device)
            for copy in self._copies:
                self._links.to_owner.recv([arrived], copy, 0).wait()
                foreach_add(grads, views_of_flat(arrived, grads))

    def _with_own(self, batch: MicroBatch) -> MicroBatch:
        if self._encode:
            return dataclasses.replace(batch, features=self._encode(batch))
        own = torch.empty(0, self._width, dtype=self._params[0].dtype, device=self._device)
        # Without an input that requires a gradient, autograd would not call `_Joined.backward`, which sends the
        # gradients back.
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
                self.send(number, grad[start:stop], worker, self._links.to_worker)
            self.retire(number - self._window.behind)

        return dataclasses.replace(batch, features=_Joined.apply(own, arrived, send_back))


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
