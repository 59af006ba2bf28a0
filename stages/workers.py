"""Work spread over processes of this machine: the same results in the same order, however many there are."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResources:
    """How a data stage runs; nothing here changes its bytes.

    Attributes:
        num_workers: processes; with 1 the work is done in this process.
        on_progress: called as (done, total) now and then, in units of the stage's own; done never goes back.
    """

    num_workers: int = 1
    on_progress: Callable[[int, int], None] | None = None

    def report(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)


def run_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int
) -> Iterator[tuple[int, Result]]:
    """(number of the task, its result) for every task, in the order in which they end.

    Args:
        function: importable by name, as are the tasks' and results' types: they cross a process border.

    Raises:
        Whatever the function raises, from the first task that fails; tasks not begun are dropped.
    """
    if num_workers <= 1 or len(tasks) <= 1:
        yield from ((i, function(task)) for i, task in enumerate(tasks))
        return
    # spawn: a fork of a process with threads (Prefect, Arrow) may never wake up
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(tasks)), context, _die_with_parent, (os.getpid(),)) as pool:
        pending = {pool.submit(function, task): i for i, task in enumerate(tasks)}
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _die_with_parent(parent: int) -> None:
    """A worker that outlived a killed stage would write into the shards of the stage's next try."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
