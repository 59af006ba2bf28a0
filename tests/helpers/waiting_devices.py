"""A rank of a pipeline whose calls of CUDA wait for the whole device.

    python -m tests.helpers.waiting_devices RUN.JSON    # with torchrun's variables

A message of a dealt image is like a kernel that runs until the other side takes part. Before this rank's layers and its
encoder run, all its messages must end: some calls of CUDA wait for the whole device, as the first call of a kernel
does.
"""

import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.families.qwen3_vl import model
from trainer.layers.packed_model import PackedModel
from trainer.loop.job import run_file
from trainer.parallel.vision.exchange import Links, VisionWorker, pipeline_links


class Message:
    """A message that begins when both sides take part; any number of waits end it."""

    def __init__(self, work: dist.Work, begin: Callable[[], None]) -> None:
        self._work, self._begin = work, begin

    def wait(self) -> None:
        if self._work is not None:
            self._begin()
            self._work.wait()
        self._work = None


class Rendezvous:
    """A group whose sender waits until the receiver has begun to receive, as NCCL does with large messages."""

    def __init__(self, group: dist.ProcessGroup, name: str, store: dist.Store, messages: list[Message]) -> None:
        self._group, self._name, self._store, self._messages = group, name, store, messages
        self._count = Counter()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Message:
        key = self._next(self._group.rank(), to)
        return self._kept(self._group.send(tensors, to, tag), lambda: self._store.wait([key], timedelta(seconds=40)))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Message:
        self._store.set(self._next(source, self._group.rank()), "")
        return self._kept(self._group.recv(tensors, source, tag), lambda: None)

    def _next(self, source: int, to: int) -> str:
        self._count[source, to] += 1
        return f"{self._name} {source} {to} {self._count[source, to]}"

    def _kept(self, work: dist.Work, begin: Callable[[], None]) -> Message:
        self._messages.append(Message(work, begin))
        return self._messages[-1]


def wait_for_messages(directory: Path) -> None:
    """Change the trainer of this process."""
    messages: list[Message] = []

    def links(pp: dist.ProcessGroup) -> Links:
        real, store = pipeline_links(pp), dist.FileStore(str(directory / "messages"))
        owner, worker = (real.to_owner, "owner"), (real.to_worker, "worker")
        return Links(*(Rendezvous(*group, store, messages) for group in (owner, worker)), real.pipeline)

    def after_messages(call: Callable) -> Callable:
        def called(*args: object) -> object:
            for message in messages:
                message.wait()
            messages.clear()
            return call(*args)

        return called

    model.pipeline_links = links
    VisionWorker.encode = after_messages(VisionWorker.encode)
    PackedModel.forward = after_messages(PackedModel.forward)


if __name__ == "__main__":
    wait_for_messages(Path(sys.argv[1]).parent)
    sys.exit(run_file(Path(sys.argv[1])))
