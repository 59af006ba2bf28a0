"""Orphans of killed processes on this machine: flow runs without a worker, trainers without a flow, servers.

Orphans are found by the marks in their environment, and only orphans of this root are ended. A flow run or a trainer
gets SIGTERM and time to save. This module does not import Prefect, so that the process that watches a service can look
for orphans often.
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import filelock
import psutil

from dataset_builders.storage.store import StorePath, side_dir
from flows.prefect_server.processes import FLOW_RUN_VARIABLE, SERVICE_VARIABLE, send, wait_gone, with_environment
from flows.prefect_server.service_record import service_dir
from stages.launchers.processes import JOB_VARIABLE, end_processes, processes_of, runs

SAVE_SECONDS = 130.0  # time for a flow run whose trainer saves: a little more than stop_grace_seconds
SERVER_SECONDS = 5.0
_TEMPORARY = "PREFECT__SERVER_EPHEMERAL"  # Prefect's mark of a temporary server
log = logging.getLogger("athanor.service")

Marked = dict[int, tuple[psutil.Process, Mapping[str, str]]]


def end_orphans(root: StorePath) -> int:
    """End all orphans of a root and return their number. Takes as long as trainers take to save.

    One process at a time, because a second SIGTERM would interrupt a flow run while its trainer saves.
    """
    if next(find_orphans(root), None) is None:
        return 0  # nothing is written into a root where nothing is to be ended
    path, ended = service_dir(root) / "ending.lock", set()
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path), ThreadPoolExecutor() as pool:
        # A trainer becomes an orphan by the end of its flow.
        while orphans := {name: end for name, end in find_orphans(root) if name not in ended}:
            log.warning("ending %s, whose parents are gone", ", ".join(orphans))
            list(pool.map(lambda end: end(), orphans.values()))
            ended |= orphans.keys()
    return len(ended)


def find_orphans(root: StorePath) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each orphan of a root, and the function that ends it."""
    side, marked = side_dir(root), marked_processes()
    for flow_run_id, tops in orphaned_flow_runs(side, marked).items():
        yield f"flow run {flow_run_id}", partial(_stop, tops, SAVE_SECONDS)
    for job in sorted(trainer_jobs(side, marked)):
        if _is_free(_lock_of(job)):
            yield f"trainer {Path(job).name}", partial(_end_trainer, job)
    for server in orphaned_servers(side, marked):
        yield f"temporary Prefect server {server.pid}", partial(_stop, [server], SERVER_SECONDS)


def marked_processes() -> Marked:
    """Return pid -> (process, environment) of every process that a service, a launcher or Prefect has started."""
    marks = {SERVICE_VARIABLE, JOB_VARIABLE, _TEMPORARY}
    return {process.pid: (process, values) for process, values in with_environment() if values.keys() & marks}


def orphaned_flow_runs(side: Path, marked: Marked) -> dict[str, list[psutil.Process]]:
    """Return flow run id -> its outermost processes, for runs whose parent is not a process of the service."""
    orphans: dict[str, list[psutil.Process]] = {}
    for process, environment in marked.values():
        is_ours = environment.get(SERVICE_VARIABLE) == str(side) and JOB_VARIABLE not in environment
        if is_ours and FLOW_RUN_VARIABLE in environment:
            with contextlib.suppress(psutil.Error):
                parent = marked.get(process.ppid())
                if parent is None or parent[1].get(SERVICE_VARIABLE) != str(side):
                    orphans.setdefault(environment[FLOW_RUN_VARIABLE], []).append(process)
    return orphans


def living_flow_runs(marked: Marked) -> set[str]:
    """Return the ids of the flow runs that have a process on this machine other than a trainer."""
    return {
        environment[FLOW_RUN_VARIABLE]
        for _, environment in marked.values()
        if FLOW_RUN_VARIABLE in environment and JOB_VARIABLE not in environment
    }


def trainer_jobs(side: Path, marked: Marked) -> set[str]:
    """Return the names of this root's jobs that have a process on this machine. A name is a directory in scratch/."""
    scratch = side.resolve() / "scratch"
    names = {environment.get(JOB_VARIABLE, "") for _, environment in marked.values()}
    return {name for name in names if name and scratch in Path(name).parents}


def orphaned_servers(side: Path, marked: Marked) -> list[psutil.Process]:
    """Return the temporary Prefect servers on this root's database whose flow has ended."""
    home = (side / "prefect").resolve()
    servers = [
        process
        for process, environment in marked.values()
        if _TEMPORARY in environment and Path(environment.get("PREFECT_HOME", "")).resolve() == home
    ]
    return [server for server in servers if not _has_flow(server)]


def _has_flow(server: psutil.Process) -> bool:
    """Whether the process that started a temporary server is still running.

    If it is, the server's parent is a Python process; the parent of an orphan is init.
    """
    try:
        parent = server.parent()
        return parent is not None and parent.pid != 1 and "python" in Path(parent.exe()).name.lower()
    except psutil.Error:
        return False


def _lock_of(job: str) -> Path:
    """Return the path of run_stage's lock, which the system frees when its process ends.

    The job directory of export is one level deeper than the job directories of other stages.
    """
    scratch = next(parent for parent in Path(job).parents if parent.name == "scratch")
    return scratch / f"{Path(job).relative_to(scratch).parts[0]}.lock"


def _is_free(path: Path) -> bool:
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(path, timeout=0):
        return True
    return False


def _end_trainer(job: str) -> None:
    # Under the lock, so that a flow with the same work starts its trainer only after this one has ended.
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(_lock_of(job), timeout=0):
        end_processes(processes_of(job), SAVE_SECONDS)


def _stop(processes: list[psutil.Process], seconds: float) -> None:
    everything = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            # Trainers are left out, since their flow makes them save. A trainer that outlives its flow is an orphan.
            everything += [p for p in process.children(recursive=True) if JOB_VARIABLE not in p.environ()]
    send(processes, signal.SIGTERM)
    wait_gone(processes, seconds)
    send([process for process in everything if runs(process)], signal.SIGKILL)
    wait_gone(everything, SERVER_SECONDS)
