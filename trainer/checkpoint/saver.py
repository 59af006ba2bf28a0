"""Saving of the training's state while the training continues. A checkpoint appears whole, by one rename.

A save stops the training only while it is planned and this rank's state is copied into reserved host memory
(trainer/checkpoint/host_memory.py). A thread writes the copy (writer.py); it takes part in no collective. At the end of
the first step at which no rank still writes, all ranks exchange their results, and rank 0 writes the record and renames
the directory. The data position is only the step (trainer/data/order.py); the learning rate is a function of the step.
"""

import concurrent.futures
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from dataset_builders.errors import InputError, one_line
from trainer.checkpoint import directory
from trainer.checkpoint.directory import FORMAT_VERSION, checkpoint_name
from trainer.checkpoint.host_memory import HostMemory, available_memory, copied_one_by_one
from trainer.checkpoint.save_and_load import state_of
from trainer.checkpoint.writer import RankFile, Written
from trainer.contract.checkpoint import write_checkpoint_record
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import RunConfig
from trainer.libraries.megatron_private import OneFile
from trainer.parallel.mesh import Mesh, processes_here

_WORTH_SAYING = 0.1  # seconds
log = logging.getLogger("athanor.trainer")


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

    def _make_memory(self, sizes: list[int], step: int) -> HostMemory | None:
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
        for old in directory.checkpoints_to_delete(self._directory, self._run.execution.checkpoint):
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
