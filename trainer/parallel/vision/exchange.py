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
        self._is_fresh = False

    def send(self, number: int, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        self._sent.append(_Sent(number, group.send([rows], rank, 0), rows))

    def retire(self, last: float) -> None:
        """Release sent messages up to and including micro batch `last`, which is known to have arrived."""
        while self._sent and self._sent[0].number <= last:
            self._sent.popleft().work.wait()

    def _moving(self) -> list[torch.nn.Parameter]:
        """Return the parameters to send to the copies at the start of this step: at first all, later the trained."""
        moving, self._is_fresh = self.trained if self._is_fresh else self._params, True
        return moving


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
    if links.pipeline is not None:
        _exchange_with_neighbours(links.pipeline, number)


def _exchange_with_neighbours(pipeline: ProcessGroup, number: torch.Tensor) -> None:
    """Send a number to the next and to the previous rank, as megatron-core's schedule sends: in batches."""
    ranks, here = dist.get_process_group_ranks(pipeline), pipeline.rank()
    for step in (1, -1):
        after, before = (ranks[(here + way) % len(ranks)] for way in (step, -step))
        send = dist.P2POp(dist.isend, number, after, pipeline)
        receive = dist.P2POp(dist.irecv, torch.empty_like(number), before, pipeline)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
