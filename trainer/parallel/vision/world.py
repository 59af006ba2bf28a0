"""The separate world of ranks that encode images and do nothing else (`parallel.vision={ranks: v}`).

The last v processes of a job are a torch.distributed world of their own. All other processes are the world of the
language model, whose code does not know about the first. Two groups of all processes join the worlds, one for each
direction.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from trainer.contract.parallel import VisionRanks
from trainer.libraries.torch_private import separate_group
from trainer.parallel.vision.exchange import Links


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

    def publish_index(self, replica: int, place: int | None) -> None:
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
