"""Writes a rank's file of a checkpoint, in this process or in one forked from it while training goes on.

megatron-core 0.16.1 plans, forks and finishes. Two of its parts are replaced, because each can end a run:

- Its writer forks one more process per file and waits without end for their answers, even that of a killed one.
- It answers through a manager process. That process ends at the SIGTERM that tells all processes of a job to stop and
  save, lives on after a killed trainer, and costs the first save 1.7 s to load torch.

Forked, not spawned (PersistentAsyncCaller): a forked process sees the memory of the instant of the fork, copied on
write, so that no later update changes what is saved. A spawned one would be sent the trainer's own CPU tensors through
shared memory, and its loop needs a CUDA device. A fork does not take the other threads along (the reader of bins,
gloo's). The writer needs nothing of theirs: it copies CPU tensors into a file and ends.
"""

import ctypes
import functools
import os
import pickle
import queue
import signal
import sys
import tempfile
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

# While this is None, planning a save starts the manager. Each save gets an Answer of its own below.
filesystem_async._results_queue = False


class OneWriter(TorchDistSaveShardedStrategy):
    """megatron-core's format, one file per rank, written by `write_files`."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # this rank has nothing to write
            return request
        writer.results_queue = Answer()
        # The caller replaces the second argument by what `preload_fn` returns: the same buckets with all tensors on the
        # CPU. Not page-locked, as megatron-core has it: such memory is shared with a forked process, not copied on
        # write, and as soon as the caller has let go of it the next micro batch is put there, into the checkpoint.
        return request._replace(
            preload_fn=functools.partial(FileSystemWriterAsync.preload_tensors, writer.write_buckets, False),
            async_fn=functools.partial(write_files, [writer.transforms]),
            async_fn_args=[os.getpid(), writer.write_buckets, writer.results_queue],
        )


class Answer:
    """The writer's answer: an unnamed file, which takes any length and needs no third process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, open as long as this is

    def put(self, answer: object) -> None:
        """Called once, by the writer."""
        pickle.dump(answer, self._file)
        self._file.flush()

    def get_nowait(self) -> object:
        """Called once, after the writer has ended."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            return RuntimeError("the process that wrote it ended without an answer, as a killed one does")


def write_files(transforms: list, trainer: int, buckets: list[WriteBucket], answer: Answer) -> None:
    """Write the files of a rank; answer with megatron-core's results by bucket number, or with the error.

    Args:
        transforms: those of torch's writer.
        trainer: id of the process that trains; a writer in another process ends with it.
        buckets: (path, name, tensors on the CPU and bytes) of each file.
    """
    if os.getpid() != trainer:
        _die_with_parent(trainer)
    results: dict[int, list] = {}
    for number, bucket in enumerate(buckets):
        replies, unfinished = queue.Queue(), queue.Queue()
        unfinished.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, replies, unfinished, use_fsync=True)
        _, result = replies.get()
        if isinstance(result, Exception):
            answer.put(_first(result))
            return
        results[number] = result
    answer.put(results)


def _first(error: BaseException) -> BaseException:
    """The first cause: a full disk, not the error of torch's zip writer when it then closes the file."""
    while before := error.__cause__ or error.__context__:
        error = before
    return error


def _die_with_parent(parent: int) -> None:
    """End with the trainer: a writer that outlived it would hold its sockets and GPU, and write into the next save."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
