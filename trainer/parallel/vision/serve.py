"""The loop of a rank that encodes images and does nothing else; the owner of its weights tells it what to do next."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import torch

from trainer.contract.answer import TrainResult
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig
from trainer.data.micro_batch import MicroBatch
from trainer.data.order import TrainingOrder, heldout_bins
from trainer.data.reader import PREFETCH_DEPTH, BinReader, prefetch
from trainer.data.slices import RankSlice
from trainer.parallel.vision.exchange import Message
from trainer.parallel.vision.worker import VisionWorker
from trainer.parallel.vision.world import Assignment


@dataclass(slots=True)
class Serving:
    """A rank that encodes images until the training ends."""

    run: RunConfig
    device: torch.device
    worker: VisionWorker
    replicas: range  # indices of the language model's replicas for which it encodes
    dp: int  # number of all replicas
    owners: list[int]  # for each of its replicas, the rank that gets the image tokens
    window: int  # micro batches of a replica that are encoded before the rank waits for the gradients of the first
    orders: list[TrainingOrder]  # for each of its replicas, the order of the bins
    heldout: BinReader
    should_stop: bool = False

    def serve(self) -> TrainResult:
        """Encode on request until the training ends, and return how it ended."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "should_stop", True))
        per_step = self.run.num_micro_batches(self.dp) * len(self.replicas)
        batches: Iterator[MicroBatch] = iter(())
        while True:
            message, number = self.worker.receive_command()
            if message is Message.END:
                return TrainResult(status="stopped" if number else "finished", step=0)
            if message is Message.BEGIN:
                batches = self._prefetched(self.orders[0].reader, self._training_bins(number))
            elif message is Message.TRAIN:
                self._encode(islice(batches, per_step))
                self.worker.finish_backward()
                self.worker.say_whether_to_stop(self.should_stop)
            else:
                with torch.no_grad():
                    self._encode(self._prefetched(self.heldout, self._heldout_bins()))

    def _training_bins(self, step: int) -> Iterator[int]:
        """Yield the bins of all replicas' micro batches, alternating between the replicas, from a step to the last."""
        for number in range(step, self.run.train.num_steps):
            for together in zip(*(order.share(number) for order in self.orders), strict=True):
                yield from together

    def _heldout_bins(self) -> Iterator[int | None]:
        parallel = self.run.execution.parallel
        multiple = parallel.pp if parallel.vpp > 1 else 1
        shares = [heldout_bins(len(self.heldout.bins), replica, self.dp, multiple) for replica in self.replicas]
        return chain.from_iterable(zip(*shares, strict=True))

    def _prefetched(self, reader: BinReader, numbers: Iterator[int | None]) -> Iterator[MicroBatch]:
        pin = self.device.type == "cuda"
        return prefetch(reader, numbers, PREFETCH_DEPTH, pin, self.run.execution.loader_workers)

    def _encode(self, batches: Iterator[MicroBatch]) -> None:
        """Encode the images of some micro batches, which alternate between the replicas."""
        self.worker.get_weights()
        behind, turns = self.window * len(self.owners), len(self.owners)
        for number, batch in enumerate(batches):
            self.worker.backward_until(number - behind)
            self.worker.retire(number - behind)
            self.worker.encode(number, batch.to(self.device), self.owners[number % turns])
            self.worker.send_until(number)


def images_of(assignment: Assignment, parallel: ParallelConfig, dp: int) -> RankSlice:
    """Return the part of a bin that a rank with this assignment reads."""
    places = parallel.cp * parallel.tp
    return RankSlice(
        pad_multiple=parallel.pad_multiple,
        cp=parallel.cp,
        vision_ranks=places,
        vision_rank=assignment.share % places,
        vision_shares=parallel.encoders_of_replica(dp),
        vision_share=assignment.share,
    )
