"""Ranks that encode images and do nothing else (`parallel.vision={ranks: v}`): their world, and their loop.

The last v processes of a job are a torch.distributed world of their own. All other processes are the world of the
language model, whose code does not know about the first. Two groups of all processes join the worlds, one for each
direction. The owner of a rank's weights tells it what to do next.
"""

import datetime
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from trainer.contract.parallel import ParallelConfig, VisionRanks
from trainer.contract.result import TrainResult
from trainer.contract.run import RunConfig
from trainer.data.micro_batch import MicroBatch
from trainer.data.order import TrainingOrder, heldout_bins
from trainer.data.reader import PREFETCH_DEPTH, BinReader, prefetch
from trainer.data.slices import RankSlice
from trainer.libraries.torch_private import separate_group
from trainer.parallel.vision.exchange import Links, Message, VisionWorker


@dataclass(frozen=True, slots=True)
class Assignment:
    """The work of one copy of the vision encoder."""

    replicas: range  # indices of the language model's replicas for which it encodes
    share: int  # index of the share of a bin's images that it encodes, if several encoders work for one replica


def assignments(encoders: int, dp: int) -> list[Assignment]:
    """Return the assignment of each copy of the vision encoder. One of the numbers must be a multiple of the other."""
    if encoders >= dp:
        shares = encoders // dp
        return [
            Assignment(range(number // shares, number // shares + 1), number % shares) for number in range(encoders)
        ]
    each = dp // encoders
    return [Assignment(range(number * each, (number + 1) * each), 0) for number in range(encoders)]


@dataclass(frozen=True, slots=True)
class VisionWorld:
    """The connection of the two worlds."""

    store: Store
    links: Links
    rank: int  # rank of this process in the whole job, which is also its rank in the links
    language_ranks: int  # number of processes of the language model
    vision_ranks: int  # number of processes that only encode images
    vision_tp: int  # number of processes that share one copy of the encoder

    @property
    def is_vision(self) -> bool:
        return self.rank >= self.language_ranks

    def publish_place(self, replica: int, place: int | None) -> None:
        """Publish this process's index in tensor and context parallel of its replica of the language model; None: it is
        not a first pipeline rank."""
        self.store.set(f"place/{self.rank}", "" if place is None else f"{replica} {place}")

    def places(self) -> dict[tuple[int, int], int]:
        """Return (replica of the language model, index in tensor and context parallel) -> its first pipeline rank."""
        texts = [self.store.get(f"place/{rank}").decode() for rank in range(self.language_ranks)]
        split = [(rank, text.split()) for rank, text in enumerate(texts) if text]
        return {(int(replica), int(place)): rank for rank, (replica, place) in split}

    def gather(self, name: str, value: str) -> list[str]:
        """Return every process's text, by rank; a collective of the job."""
        self.store.set(f"{name}/{self.rank}", value)
        everybody = range(self.language_ranks + self.vision_ranks)
        # `get` waits until the process has set its text.
        return [self.store.get(f"{name}/{rank}").decode() for rank in everybody]

    def workers_of(self, replica: int, place: int, places: int, dp: int) -> tuple[list[int], list[int]]:
        """Return the workers of one rank of a replica of the language model, in two lists.

        Args:
            place: index of the rank in tensor and context parallel of its replica.
            places: number of such indices in a replica.
            dp: number of replicas.

        Returns:
            The ranks that send image tokens to it, the first rank of each copy of the encoder; and the ranks among them
            that also get their weights from it and send it their gradients.
        """
        mine = [
            (self.language_ranks + number * self.vision_tp, assignment)
            for number, assignment in enumerate(assignments(self.vision_ranks // self.vision_tp, dp))
            if replica in assignment.replicas and assignment.share % places == place
        ]
        return [rank for rank, _ in mine], [rank for rank, assignment in mine if assignment.replicas[0] == replica]


def join(
    rank: int, processes: int, vision: VisionRanks, timeout: datetime.timedelta, device: torch.device
) -> VisionWorld:
    """Join this process's own world, and the groups that connect the two worlds; a collective of the job."""
    store, _, _ = next(dist.rendezvous("env://", rank, processes, timeout=timeout))
    language = processes - vision.ranks
    is_vision, backend = rank >= language, "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("vision" if is_vision else "language", store),
        rank=rank - language if is_vision else rank,
        world_size=vision.ranks if is_vision else language,
        timeout=timeout,
    )
    stores = [PrefixStore(name, store) for name in ("to owner", "to worker")]
    links = Links(*(separate_group(backend, each, rank, processes, timeout, device) for each in stores))
    return VisionWorld(PrefixStore("bridge", store), links, rank, language, vision.ranks, vision.tp)


@dataclass(slots=True)
class VisionServer:
    """The loop of a rank that encodes images until the training ends."""

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
                self.worker.send_stop_flag(self.should_stop)
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
        self.worker.receive_weights()
        behind, turns = self.window * len(self.owners), len(self.owners)
        for number, batch in enumerate(batches):
            self.worker.backward_until(number - behind)
            self.worker.release_sent(number - behind)
            self.worker.encode(number, batch.to(self.device), self.owners[number % turns])
            self.worker.send_until(number)


def encoder_slice(assignment: Assignment, parallel: ParallelConfig, dp: int) -> RankSlice:
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
