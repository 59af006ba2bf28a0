"""Ranks that encode images and do nothing else (`parallel.vision={ranks: v}`): a world beside the language model's.

The last v processes of a job are a torch.distributed world of their own, the others are the world of the language
model, whose code knows nothing of it. Two groups of all processes join them, one for each direction.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from trainer.contract.parallel import VisionRanks
from trainer.parallel.vision_exchange import Links

_BACKENDS = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}


@dataclass(frozen=True, slots=True)
class Role:
    """What a copy of the vision encoder works for.

    Attributes:
        replicas: copies of the language model, by number.
        share: which share of a bin's images it encodes, if several work for a copy of the language model.
    """

    replicas: range
    share: int


def roles(encoders: int, dp: int) -> list[Role]:
    """Of each copy of the vision encoder; one of the two numbers is a multiple of the other."""
    if encoders >= dp:
        shares = encoders // dp
        return [Role(range(number // shares, number // shares + 1), number % shares) for number in range(encoders)]
    each = dp // encoders
    return [Role(range(number * each, (number + 1) * each), 0) for number in range(encoders)]


@dataclass(frozen=True, slots=True)
class Bridge:
    """What joins the two worlds.

    Attributes:
        rank: of this process in the job, which is its number in the links.
        language_ranks: processes of the language model.
        vision_ranks: the others.
    """

    store: Store
    links: Links
    rank: int
    language_ranks: int
    vision_ranks: int
    vision_tp: int

    @property
    def is_vision(self) -> bool:
        return self.rank >= self.language_ranks

    def say_place(self, replica: int, place: int | None) -> None:
        """Say which place of which copy of the language model this process has; None: it is no first pipeline rank."""
        self.store.set(f"place/{self.rank}", "" if place is None else f"{replica} {place}")

    def places(self) -> dict[tuple[int, int], int]:
        """(copy of the language model, place in its tensor and context parallel) -> its first pipeline rank."""
        texts = [self.store.get(f"place/{rank}").decode() for rank in range(self.language_ranks)]
        split = [(rank, text.split()) for rank, text in enumerate(texts) if text]
        return {(int(replica), int(place)): rank for rank, (replica, place) in split}

    def gather(self, name: str, value: str) -> list[str]:
        """Every process's text, by rank; a collective of the job."""
        self.store.set(f"{name}/{self.rank}", value)
        everybody = range(self.language_ranks + self.vision_ranks)
        return [self.store.get(f"{name}/{rank}").decode() for rank in everybody]

    def workers_of(self, replica: int, place: int, places: int, dp: int) -> tuple[list[int], list[int]]:
        """Ranks that send image tokens to a place of a copy of the language model, the first of each copy of the
        encoder, and those of them that get their weights from it and give it their gradients."""
        mine = [
            (self.language_ranks + number * self.vision_tp, role)
            for number, role in enumerate(roles(self.vision_ranks // self.vision_tp, dp))
            if replica in role.replicas and role.share % places == place
        ]
        return [rank for rank, _ in mine], [rank for rank, role in mine if role.replicas[0] == replica]


def join(rank: int, processes: int, vision: VisionRanks, timeout: datetime.timedelta, device: torch.device) -> Bridge:
    """Join this process's own world, and the groups that join the two; a collective of the job."""
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
    names = ("to owner", "to worker")
    links = Links(*(_group(backend, PrefixStore(name, store), rank, processes, timeout, device) for name in names))
    return Bridge(PrefixStore("bridge", store), links, rank, language, vision.ranks, vision.tp)


def _group(
    backend: str, store: Store, rank: int, size: int, timeout: datetime.timedelta, device: torch.device
) -> ProcessGroup:
    """A process group that belongs to no world."""
    group = ProcessGroup(store, rank, size)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        messages = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        messages = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._register_backend(torch.device(device.type), _BACKENDS[backend], messages)
    group._set_default_backend(_BACKENDS[backend])
    return group
