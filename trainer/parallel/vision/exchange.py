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

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.data.micro_batch import MicroBatch

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


class Message(enum.IntEnum):
    """What an owner tells the ranks that encode images and do nothing else."""

    BEGIN = 0  # the training, at a step
    TRAIN = 1  # a step
    EVALUATE = 2  # the held-out bins
    END = 3  # the training; 1: it was stopped


class _Sent(NamedTuple):
    number: int  # of the micro batch
    work: dist.Work
    rows: torch.Tensor  # kept until they have arrived


class ExchangeSide:
    """What both sides have: the encoder's parameters, and messages on their way."""

    def __init__(self, encoder: torch.nn.Module, links: Links) -> None:
        self.part = torch.nn.ModuleDict({"vision": encoder})  # parameters by their names in the model
        self._links = links
        self._sent: deque[_Sent] = deque()

    def prepare(self, device: torch.device) -> None:
        """Take what is trained, once it is known what is frozen."""
        self._device = device
        # What is trained comes first, and moves at every step.
        self._params = sorted(self.part.parameters(), key=lambda param: not param.requires_grad)
        self.trained = [param for param in self._params if param.requires_grad]
        self._is_fresh = False

    def send(self, number: int, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        self._sent.append(_Sent(number, group.send([rows], rank, 0), rows))

    def retire(self, last: float) -> None:
        """Let go of what has been sent, up to a micro batch of which it is known that it has arrived."""
        while self._sent and self._sent[0].number <= last:
            self._sent.popleft().work.wait()

    def _moving(self) -> list[torch.nn.Parameter]:
        """The parameters whose values this step begins by giving to the copies: at first all, then the trained."""
        moving, self._is_fresh = self.trained if self._is_fresh else self._params, True
        return moving


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
