"""The data stages' shard tasks on a Dask cluster (`execution.dask_address`). Needs `pip install -e '.[dask]'`.

The flow and its stages stay in the flow's process, with progress, logs, locks and manifests. Only shard tasks run on
the cluster, one at a time on each worker process. So the workers need

    the same athanor and the same versions of the packages that decide bytes (checked before the work starts);
    the same paths: a shared file system, or an object store's URL as root and source (checked too);
    one thread each (`dask worker tcp://host:8786 --nthreads 1 --nworkers 16`): further threads of a worker are idle.

If a worker is lost, Dask gives its shard to another worker, up to `distributed.scheduler.allowed-failures` times (3). A
shard that takes down one worker after another is an InputError. Files are written completely or not at all, and their
bytes depend only on the input, so a shard that is made twice does no harm. A thread of a worker cannot be stopped. So
before a run writes to the directory of an interrupted run, it waits for the tasks that are still running there.

distributed is imported on use, so that it need not be installed if no address is set.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import StorePath, make_dir
from flows.pipeline.config import ExecutionConfig
from flows.pipeline.dask_worker import KEY_PREFIX, look, run_shard_task, running_tasks, versions
from stages.shared.artifacts.workers import StageResources

_CONNECT_SECONDS = 10.0
_WORKER_SECONDS = 60.0  # for the first worker to answer: an adaptive cluster may have none at first
_BUSY_SECONDS = 600.0  # for shards of an interrupted run to end

_log = logging.getLogger("athanor")


@contextlib.contextmanager
def on_cluster(execution: ExecutionConfig, root: StorePath, sources: Sequence[StorePath]) -> Iterator[None]:
    """Connect the process to the scheduler while the block lasts, if there is a `dask_address`.

    Args:
        root, sources: directories that every worker must see.

    Raises:
        InputError: the extra is not installed; the scheduler does not answer; a worker does not see the root or a
            source, or has other versions.
    """
    if execution.dask_address is None:
        yield
        return
    distributed = _distributed(execution)
    _knock(execution)
    with distributed.Client(execution.dask_address, set_as_default=True, timeout=_CONNECT_SECONDS) as client:
        _check_workers(client, execution, root, sources)
        yield


@contextlib.contextmanager
def with_cluster(resources: StageResources, execution: ExecutionConfig) -> Iterator[StageResources]:
    """Yield the resources, with the cluster as their executor if there is a `dask_address`. Use inside `on_cluster`.

    Raises:
        InputError: a shard took down one worker after another; the scheduler was lost; a worker is still busy with a
            shard of an interrupted run.
    """
    if execution.dask_address is None:
        yield resources
        return
    distributed = _distributed(execution)
    client = distributed.default_client()
    _wait_while_busy(client, execution, lambda _, is_unwanted: is_unwanted)
    executor = _ShardExecutor(client)
    try:
        yield dataclasses.replace(resources, executor=executor, num_workers=len(client.nthreads()))
    except CancelledError as error:
        raise InputError(
            f"{_field(execution)}: the connection to the scheduler was lost; finished shards are kept: run the "
            "same command again once it answers"
        ) from error
    except BaseException as error:
        _wait_while_busy(client, execution, lambda key, _: key.startswith(executor.key_prefix))
        if isinstance(error, distributed.KilledWorker):
            raise InputError(
                f"{_field(execution)}: a shard was given up after {error.allowed_failures + 1} workers died over "
                f"it, the last {error.last_worker.address}; look at that worker's log (is its memory too small?), "
                "then run the same command again: finished shards are kept"
            ) from error
        raise


def _knock(execution: ExecutionConfig) -> None:
    """Raise InputError if no scheduler answers. This uses no Client, because a failed Client would remain the default
    client of the process."""
    connect = _distributed(execution).comm.connect

    async def knock() -> None:
        comm = await asyncio.wait_for(connect(execution.dask_address, timeout=_CONNECT_SECONDS), _CONNECT_SECONDS)
        comm.abort()

    try:
        with ThreadPoolExecutor(1) as thread:  # Prefect may have an event loop in the current thread
            thread.submit(asyncio.run, knock()).result()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{_field(execution)}: no Dask scheduler answers there ({one_line(error) or type(error).__name__}); start "
            "one (`dask scheduler`), mend the address, or leave execution.dask_address out to use this machine alone"
        ) from error


class _ShardExecutor(Executor):
    """A Dask client's executor whose task keys start with a prefix that is unique to it."""

    def __init__(self, client: Any) -> None:
        self.key_prefix = f"{KEY_PREFIX}-{uuid.uuid4().hex[:12]}-"
        self._inner = client.get_executor(pure=False)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        key = f"{self.key_prefix}{function.__name__}-{uuid.uuid4().hex[:12]}"
        return self._inner.submit(run_shard_task, function, *args, key=key, **kwargs)


def _check_workers(client: Any, execution: ExecutionConfig, root: StorePath, sources: Sequence[StorePath]) -> None:
    with _marker(root) as (marker, token):
        question = (str(marker), token, [str(source) for source in sources])
        first = client.submit(look, *question, pure=False)
        try:
            _distributed(execution).wait(first, timeout=_WORKER_SECONDS)
        except TimeoutError as error:
            raise InputError(
                f"{_field(execution)}: no worker answered in {_WORKER_SECONDS:.0f} s; start some: "
                f"`dask worker {execution.dask_address} --nthreads 1 --nworkers 4`"
            ) from error
        answers = client.run(look, *question, on_error="return")
    for worker, answer in sorted(answers.items()):
        _check_worker(f"{_field(execution)}: worker {worker}", answer)
    crowded = {worker: threads for worker, threads in client.nthreads().items() if threads > 1}
    if crowded:
        worker, threads = min(crowded.items())
        _log.warning(
            "Dask worker %s has %d threads, of which the data stages use one (so have %d of %d workers); start "
            "workers with `--nthreads 1 --nworkers N`",
            *(worker, threads, len(crowded), len(answers)),
        )


def _check_worker(what: str, answer: dict[str, Any] | Exception) -> None:
    if isinstance(answer, Exception):
        reason = one_line(answer) or type(answer).__name__
        raise InputError(f"{what} cannot run athanor ({reason}); install the same athanor there") from answer
    if answer["unseen"] is not None:
        raise InputError(
            f"{what} on {answer['host']} does not see {answer['unseen']}; give it the same paths by a file system "
            "that all share, or use an object store's URL"
        )
    for name, version in versions().items():
        if answer["versions"].get(name) != version:
            raise InputError(
                f"{what} on {answer['host']} has {name} {answer['versions'].get(name)}, this machine has {version}, "
                "and bytes would depend on the machine; install the same there and restart it"
            )


@contextlib.contextmanager
def _marker(root: StorePath) -> Iterator[tuple[StorePath, str]]:
    """Write a file below the root. A worker that reads its text sees this root, and not another one with the same name.

    Yields:
        the path of the file and its text.
    """
    token = uuid.uuid4().hex
    make_dir(root)
    path = root / f"dask-{token[:12]}.txt"
    write_text(path, token)
    try:
        yield path, token
    finally:
        path.unlink(missing_ok=True)


def _wait_while_busy(client: Any, execution: ExecutionConfig, counts: Callable[[str, bool], bool]) -> None:
    """Wait until no worker runs a shard task that `counts`.

    Args:
        counts: function of a task's key and whether the task was cancelled.
    """
    end, was_logged = time.monotonic() + _BUSY_SECONDS, False
    while busy := [
        worker for worker, tasks in client.run(running_tasks).items() if any(counts(*task) for task in tasks)
    ]:
        if time.monotonic() > end:
            raise InputError(
                f"{_field(execution)}: worker {min(busy)} is still at a shard of an interrupted run after "
                f"{_BUSY_SECONDS:.0f} s; restart it, then run the same command again"
            )
        if not was_logged:
            _log.warning("waiting for %d Dask workers that are still at shards of an interrupted run", len(busy))
            was_logged = True
        time.sleep(0.2)


def _distributed(execution: ExecutionConfig) -> ModuleType:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        missing = error.name or "distributed"
        raise InputError(
            f"{_field(execution)} needs {missing}, which is not installed: pip install -e '.[dask]', "
            "or leave execution.dask_address out to use this machine alone"
        ) from error


def _field(execution: ExecutionConfig) -> str:
    return f"execution.dask_address={execution.dask_address}"
