"""Saving of the training's state while the training continues. A checkpoint appears whole, by one rename.

A save stops the training only while it is planned and this rank's state is copied into reserved host memory
(`HostMemory`). A thread writes the copy (`RankFile`); it takes part in no collective. At the end of the first step at
which no rank still writes, all ranks exchange their results, and rank 0 writes the record and renames the directory
(`Checkpointer`). The data position is only the step (trainer/data/order.py); the learning rate is a function of the
step.
"""

import concurrent.futures
import contextlib
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import write_json
from trainer.checkpoint import directory
from trainer.checkpoint.directory import FORMAT_VERSION, checkpoint_name
from trainer.checkpoint.save_and_load import state_of
from trainer.contract.checkpoint import STATE_DIGESTS, checkpoints_to_delete, write_checkpoint_record
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import RunConfig
from trainer.libraries.megatron_private import OneFile, replace_writer
from trainer.libraries.torch_private import write_entry
from trainer.parallel.mesh import Mesh, processes_here

_WORTH_SAYING = 0.1  # seconds
_CHUNK = 64 << 20  # bytes between two checks of whether to stop
_BLOCK = 1 << 30  # bytes that are page-locked at a time: the driver serves no other call meanwhile
_CGROUPS = Path("/sys/fs/cgroup")
log = logging.getLogger("athanor.trainer")

# torch ignores these checksums when it reads, and they take as long as the disk (1.6 GB/s). Instead each entry's xxh3
# (16 GB/s) is in `__0_0.distcp.xxh3` of the same directory, and is compared when the entry is read.
torch.serialization.set_crc32_options(False)


class Checkpointer:
    """A saver of one state at a time. Its methods are collectives: all ranks call them at the same step. Leaving its
    context stops an unfinished write.

    Raises:
        InputError: (constructor, on all ranks) the disk has no room for the run's checkpoints.
        RuntimeError: (any method, on all ranks) a save failed; the message names its directory. Earlier checkpoints are
            untouched.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        run: RunConfig,
        mesh: Mesh,
        step: int = 0,
    ) -> None:
        self._chunks, self._optimizer, self._run, self._mesh = chunks, optimizer, run, mesh
        self._directory = self._work = run.output_dir / CHECKPOINTS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._ended = threading.Event()
        self._file: RankFile | None = None
        self._finalize: list[Callable[[], None]] = []
        self._writing: Future[Written] | None = None
        self._deleting: Future[None] | None = None
        self._step, self._begun, self._blocked = step, 0.0, 0.0
        # The sizes of a save are known before the first step, and equal in all saves: so its memory is made once.
        sizes = _sizes(state_of(chunks, optimizer, step, loading=False))
        self._size = sum(mesh.gather(sum(sizes)))
        problem = None
        if mesh.is_main:
            self._directory.mkdir(parents=True, exist_ok=True)
            directory.delete_leftovers(self._directory)
            problem = directory.lacks_space_for_run(run, self._size, step)
        if problem := mesh.from_main(problem):
            raise InputError(problem)
        self._memory = self._make_memory(sizes, step)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_error: object) -> None:
        # `finish` was called before, unless the training fails: its unfinished save is deleted at the next start.
        self._ended.set()
        self._thread.shutdown()
        if self._memory is not None:
            self._memory.release()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its file of the current save."""
        return self._writing is not None and not self._writing.done()

    def save(self, step: int) -> None:
        """Save the current state of everything that a resume needs. An asynchronous save writes its files later."""
        self.finish()  # one save at a time: the host memory holds one copy
        self._step, self._begun = step, time.perf_counter()
        self._work = self._directory / f"saving-{checkpoint_name(step)}"
        self._on_main(self._begin)
        state = state_of(self._chunks, self._optimizer, step, loading=False)
        strategy = OneFile()
        request = dist_checkpointing.save(state, str(self._work), sharded_strategy=strategy, async_sharded_save=True)
        self._file, self._finalize = strategy.file, request.finalize_fns
        tensors = self._file.tensors
        # The tensors are views of the optimizer's own. They are copied on the current stream, before the next update.
        copies = copied_one_by_one(tensors) if self._memory is None else self._memory.copy(tensors)
        self._writing = self._thread.submit(self._file.write, copies, self._ended)
        self._blocked = time.perf_counter() - self._begun
        if self._memory is None:  # the tensors must not change before they are written
            self.finish()

    def finish(self) -> None:
        """Wait for the current save to be written, and publish it."""
        if self._writing is None:
            return
        started = time.perf_counter()
        concurrent.futures.wait([self._writing])
        if self._memory is not None and time.perf_counter() - started > _WORTH_SAYING:
            log.info("waited %.1f s for %s to be written", time.perf_counter() - started, checkpoint_name(self._step))
        # `_writing` is None before anything can fail, so that a second call does not wait for the failed save again.
        error, writing, self._writing = self._writing.exception(), self._writing, None
        for rank, failure in enumerate(self._mesh.gather(error and (str(_first(error)) or repr(error)))):
            if failure is not None:
                self._fail(f"rank {rank}: {failure}")
        self._file.written = writing.result()
        # megatron-core's own functions gather the ranks' results and write `.metadata`.
        for finalize in self._finalize:
            finalize()
        self._on_main(self._publish)
        self._blocked += time.perf_counter() - started
        seconds = time.perf_counter() - self._begun
        what = f"checkpoint: {checkpoint_name(self._step)}, {self._size / 1e9:.3f} GB in {seconds:.1f} s"
        log.info("%s; training waited %.2f s", what, self._blocked)

    def _make_memory(self, sizes: list[int], step: int) -> "HostMemory | None":
        """Allocate memory for the copies. Return None if saves are synchronous, if only the last step is saved, or if
        memory is short."""
        config, num_steps = self._run.execution.checkpoint, self._run.train.num_steps
        first = step - step % config.save_interval + config.save_interval
        if not config.asynchronous or first >= num_steps:
            return None
        needed, free = HostMemory.needed(sizes), available_memory()
        if self._mesh.any(needed * processes_here() > free)[0]:
            log.warning(
                "saves will stop the training while they write: a copy of the state takes %.1f GB of host memory in "
                "each of %d processes here, and %.1f GB are free; execution.checkpoint.asynchronous=false asks for it",
                *(needed / 1e9, processes_here(), free / 1e9),
            )
            return None
        return HostMemory(sizes, self._mesh.device)

    def _begin(self) -> None:
        if self._deleting is not None:
            self._deleting.result()
        if problem := directory.lacks_space(self._directory, self._size, f"checkpoint {checkpoint_name(self._step)}"):
            raise OSError(problem)
        self._work.mkdir()

    def _publish(self) -> None:
        record = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self._run.fingerprint,
            "step": self._step,
            "train": self._run.train.model_dump(mode="json"),
            # Only `sharding` is read again, because any layout can load a checkpoint; the rest is for people.
            "parallel": self._run.execution.parallel.model_dump(mode="json"),
            "world_size": self._mesh.world_size,
        }
        if self._run.train.adapter is not None:  # the adapters' weights are not a whole model
            record["base"] = {"hf_dir": str(self._run.hf_dir), "digest": self._run.base_digest}
        write_checkpoint_record(self._work, record)
        final = self._directory / checkpoint_name(self._step)
        if final.exists():  # a rename onto a directory that is not empty would fail
            directory.delete(final)
        self._work.rename(final)
        # On the writer's thread, so that the training does not wait for the deletion of large files.
        config = self._run.execution.checkpoint
        for old in checkpoints_to_delete(self._directory, config.keep_last, config.keep_every):
            self._deleting = self._thread.submit(directory.delete, old)

    def _on_main(self, work: Callable[[], None]) -> None:
        """Do some work on rank 0 while all other ranks wait; if it fails, all ranks raise."""
        problem = None
        if self._mesh.is_main:
            try:
                work()
            except OSError as error:
                problem = str(error)
        if problem := self._mesh.from_main(problem):
            self._fail(problem)

    def _fail(self, problem: str) -> None:
        """Delete the partial save, to free a full disk, and raise the error that ends the training."""
        if self._mesh.is_main:
            shutil.rmtree(self._work, ignore_errors=True)
        raise RuntimeError(
            f"{self._work}: this checkpoint could not be written ({one_line(problem, 300)}); earlier ones are whole, "
            "and the next run goes on from the newest"
        )


def _first(error: BaseException) -> BaseException:
    """Return the first cause of an error: a full disk, not the error of torch's zip writer that follows from it."""
    while before := error.__cause__ or error.__context__:
        error = before
    return error


def _sizes(state: dict) -> list[int]:
    """Return the bytes of each tensor that this rank writes."""
    apply_factories(state)
    tensors = (v for v in nested_values(state) if isinstance(v, ShardedTensor) and is_main_replica(v.replica_id))
    return [tensor.data.nbytes for tensor in tensors]


class WritingEnded(Exception):
    """The error that the writer was told to stop before it had written everything."""


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a rank's write: megatron-core's results, and the number of bytes."""

    results: list[WriteResult]
    size: int


class RankFile(FileSystemWriterAsync):
    """The plan of this rank's file; `write` writes the file, on a separate thread while training continues.

    megatron-core 0.16.1 plans the contents of a rank's file. Its own writer forks a process per file and a manager
    process, which can end a run: they wait forever for a killed process, or die at the SIGTERM that tells a job to stop
    and save. A thread avoids this. It holds Python's lock for a tenth of a millisecond per tensor; writing to the disk,
    digests and waiting for the disk happen without the lock.

    Attributes:
        tensors: the tensors of the file, as views of the training's own tensors on their device.
        written: the outcome; to be set after `write`, before megatron-core asks for the results.
    """

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take the plan of the file; megatron-core calls this when it plans."""
        self._name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        data = [(item, planner.resolve_data(item)) for item in plan.items]
        self._objects = [entry for entry in data if entry[0].type == WriteItemType.BYTE_IO]
        self._items = [item for item, _ in data if item.type != WriteItemType.BYTE_IO]
        self.tensors: list[torch.Tensor] = [t.detach() for item, t in data if item.type != WriteItemType.BYTE_IO]
        self.written: Written | None = None

    def get_save_function_and_args(self) -> tuple[None, None, list]:
        """Return no function, so that megatron-core itself writes nothing."""
        return None, None, []

    def retrieve_write_results(self) -> list[WriteResult]:
        return self.written.results

    def write(self, tensors: Iterable[torch.Tensor], ended: threading.Event) -> Written:
        """Write the file and sync it to the disk, and write the file of its digests.

        Args:
            tensors: copies of `self.tensors` on the CPU, each with its own storage.

        Raises:
            WritingEnded: `ended` was set meanwhile.
        """
        path = Path(self.checkpoint_dir) / self._name
        digests, results = {}, []
        if not (self._objects or self._items):
            return Written([], 0)
        with path.open("wb") as file:
            stream = _DigestingStream(file, ended)
            on_cpu = iter(tensors)
            for item, data in [*self._objects, *((item, None) for item in self._items)]:
                place = stream.tell()
                # Taken one by one: a synchronous save copies the next tensor while this one is written.
                data = next(on_cpu) if data is None else data
                result = write_entry(self.transforms, stream, data, item, self._name, SerializationFormat.TORCH_SAVE)
                results.append(result)
                digests[str(place)] = stream.take_digest()
            size = stream.tell()
            file.flush()
            os.fsync(file.fileno())
        write_json(path.with_name(path.name + STATE_DIGESTS), digests)
        return Written(results, size)


class _DigestingStream:
    """A file that digests the written bytes entry by entry, and starts their write-back at once."""

    def __init__(self, file: BinaryIO, ended: threading.Event) -> None:
        self._file, self._ended = file, ended
        self._digest = xxhash.xxh3_64()
        self._size = self._on_its_way = 0
        self.flush = file.flush

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            if self._ended.is_set():
                raise WritingEnded
            part = view[start : start + _CHUNK]
            self._digest.update(part)
            self._file.write(part)
            self._size += len(part)
            waiting = self._size - self._on_its_way
            # Write-back only at the end costs a third of the rate (1.29 GB/s against 0.95 with fsync, 6 GB). No written
            # page stays in the page cache.
            if waiting >= _CHUNK and hasattr(os, "posix_fadvise"):  # Linux: starts the write-back, does not wait for it
                os.posix_fadvise(self._file.fileno(), self._on_its_way, waiting, os.POSIX_FADV_DONTNEED)
                self._on_its_way = self._size
        return len(view)

    def take_digest(self) -> str:
        """Return the digest of everything written since the last call."""
        digest, self._digest = self._digest.hexdigest(), xxhash.xxh3_64()
        return digest


class HostMemory:
    """Host memory for copies of a device's tensors with these `sizes` in bytes, which may come in any order.

    It is allocated once, on a thread during the first steps, and every save reuses it: allocating 30 GB of page-locked
    memory takes longer than ten copies into it. For a GPU the memory is page-locked, so that the copy runs at the bus's
    rate.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._places: list[int] = []
        self._locked: list[int] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="host-memory")
        self._thread.start()

    @staticmethod
    def needed(sizes: Iterable[int]) -> int:
        """Return the bytes that tensors of these sizes take, each in whole pages."""
        return sum(map(_in_pages, sizes))

    def _make(self) -> None:
        started = time.perf_counter()
        try:
            _use(self._device)
            self._memory = mmap.mmap(-1, self.needed(self._sizes) or mmap.PAGESIZE)
            with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            start = end = 0
            for size in self._sizes:
                self._places.append(end)
                end += _in_pages(size)
                # A block ends with a tensor, so that no copy crosses a border of locked memory.
                if end - start >= _BLOCK:
                    self._make_block(start, end)
                    start = end
            self._make_block(start, end)
            log.info("%.3f GB of host memory for saves made in %.1f s", end / 1e9, time.perf_counter() - started)
        except Exception as error:  # raised when the memory is used
            self._error = error

    def _make_block(self, start: int, end: int) -> None:
        if start == end:
            return
        block = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - start, offset=start)
        block.zero_()  # the first write to a page allocates it
        if self._device.type == "cuda":
            error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), end - start, 0)
            if error == torch.cuda.cudart().cudaError.success:
                self._locked.append(block.data_ptr())
            else:
                log.warning(
                    "%.1f GB of host memory cannot be page-locked (%s): saves take longer", block.nbytes / 1e9, error
                )

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return finished copies of the tensors, each with its own storage. They overwrite the previous copies."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        free: dict[int, list[int]] = {}
        for place, size in zip(self._places, self._sizes, strict=True):
            free.setdefault(size, []).append(place)
        copies = []
        for tensor in tensors:
            place = free[tensor.nbytes].pop()
            room = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            copies.append(room.view(tensor.shape).copy_(tensor, non_blocking=True))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Unlock the memory. The copies must no longer be in use."""
        self._thread.join()
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()


def copied_one_by_one(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield copies of the tensors on the CPU, each with its own storage; the next is copied while one is in use. Only
    for a save that blocks: the tensors must not change meanwhile."""
    if not tensors:
        return
    with ThreadPoolExecutor(1, initializer=_use, initargs=(tensors[0].device,)) as ahead:
        coming = ahead.submit(tensors[0].to, "cpu", copy=True)
        for tensor in tensors[1:]:
            ready, coming = coming, ahead.submit(tensor.to, "cpu", copy=True)
            yield ready.result()
        yield coming.result()


def _use(device: torch.device) -> None:
    """Select this process's GPU on a new thread. It starts on the first GPU, where a call would allocate a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def available_memory() -> int:
    """Return the bytes that this process may still allocate, by the machine's memory and its control groups' limits."""
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield the free bytes of each version 2 control group with a limit."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return
    for group in (_CGROUPS / own, *(_CGROUPS / own).parents):
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            # The page cache can be reclaimed, and counts as free.
            yield int(limit) - used + int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


replace_writer(RankFile)
