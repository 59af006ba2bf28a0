"""Tasks spread over processes, on this machine or a cluster. Neither their number nor their order changes the results.

A stage passes its tasks, each a shard or a part of the source, to `run_tasks`, and knows neither the number of
processes nor their machines. Every task commits its files by itself, so a run that ends early loses only unfinished
tasks.
"""

import dataclasses
import itertools
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from dataset_builders.errors import InputError
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.parent import end_with_parent
from trainer.contract.result import MetricsRow
from trainer.contract.run import TrainerExecution

Task = TypeVar("Task")
Result = TypeVar("Result")

# Limits on submitted, unfinished tasks, so that a million shards never become a million futures. They leave a next task
# ready for each worker, and let a small cluster detect that it may grow.
_AHEAD_PER_WORKER = 4
_AHEAD_AT_LEAST = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResources:
    """The execution settings and callbacks of a stage. They never change its output, and no stage needs all of them.

    Attributes:
        num_workers: number of processes; with 1, this process does the work. With an executor, roughly its number of
            workers.
        executor: runs tasks outside this machine's processes, for example on a cluster. It must import the same code
            and see the same paths; its creator closes it.
        cluster: where a job of several processes runs, for example the trainer.
        trainer: execution settings of the trainer.
        on_progress: called from time to time with (finished, total), in units of the stage; `finished` never decreases.
        on_rows: called with every new line of a training's metrics.jsonl, in order of steps.
        on_line: called with every line of a job's log.
    """

    num_workers: int = 1
    executor: Executor | None = None
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerExecution = field(default_factory=TrainerExecution)
    on_progress: Callable[[int, int], None] | None = None
    on_rows: Callable[[list[MetricsRow]], None] = lambda rows: None
    on_line: Callable[[str], None] = lambda line: None

    def report(self, finished: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(finished, total)

    def at_most(self, num_workers: int) -> "StageResources":
        """Return the same resources with at most this number of processes; an executor is not changed."""
        if self.executor is not None:
            return self
        return dataclasses.replace(self, num_workers=min(self.num_workers, num_workers))


def run_tasks(
    function: Callable[[Task], Result], tasks: Iterable[Task], resources: StageResources
) -> Iterator[tuple[int, Result]]:
    """Yield (number of the task, its result) for every task, in the order in which the tasks end.

    Args:
        function: importable by name, like the types of tasks and results, since they are passed between processes.
        tasks: taken one by one, as workers need them.
        resources: an executor, if there is one, gets every task; otherwise they go to `num_workers` processes, or
            run in this one if that is 1 or there is only one task.

    Raises:
        Any error of `function`, from the first task that fails. Tasks that have not started are dropped, and running
        tasks are awaited.
        InputError: a process of this machine died.
    """
    # No Prefect task for each of them: several calls of its API each, and ten thousand boxes on its page.
    numbered = enumerate(tasks)
    if resources.executor is not None:
        ahead = max(_AHEAD_AT_LEAST, _AHEAD_PER_WORKER * resources.num_workers)
        yield from _spread(resources.executor, function, numbered, ahead)
        return
    first = list(itertools.islice(numbered, 2))
    numbered = itertools.chain(first, numbered)
    if resources.num_workers <= 1 or len(first) < 2:
        yield from ((i, function(task)) for i, task in numbered)
        return
    # spawn: a fork of a process with threads (Prefect, Arrow) may hang
    context = multiprocessing.get_context("spawn")
    # A worker that outlived its parent would write into the shards of the stage's next run.
    ends = (os.getpid(), signal.SIGKILL)
    with ProcessPoolExecutor(resources.num_workers, context, end_with_parent, ends) as pool:
        try:
            yield from _spread(pool, function, numbered, _AHEAD_PER_WORKER * resources.num_workers)
        except BrokenExecutor as error:
            raise InputError(
                f"one of {resources.num_workers} worker processes died in {function.__name__}: it was killed, or "
                "memory ran out; finished shards are kept: run the same command again, with a smaller "
                "execution.num_workers if memory was short"
            ) from error


def _spread(
    executor: Executor, function: Callable[[Task], Result], numbered: Iterator[tuple[int, Task]], ahead: int
) -> Iterator[tuple[int, Result]]:
    """Run tasks on an executor, with at most `ahead` submitted, unfinished tasks. See `run_tasks`."""
    numbers: dict[Future[Result], int] = {}
    ended: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()

    def submit(count: int) -> None:
        for i, task in itertools.islice(numbered, count):
            future = executor.submit(function, task)
            numbers[future] = i
            future.add_done_callback(ended.put)

    try:
        submit(ahead)
        while numbers:
            future = ended.get()
            number = numbers.pop(future)
            result = future.result()
            submit(1)
            yield number, result
    finally:
        # A task that cannot be cancelled continues to write: its directory is free only when it has ended.
        wait([future for future in numbers if not future.cancel()])
