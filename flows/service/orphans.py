"""What killed processes leave behind on this machine: flow runs without a worker, trainers without a flow, servers.

Everything is found by what a process carries in its environment, and only what belongs to this root is touched. A flow
run or a trainer is told to stop and gets its time to save. No Prefect is loaded here, so that the process which watches
a service may look often.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import psutil

from dataset_builders.contracts.store import StorePath, side_dir
from flows.service.processes import FLOW_RUN_VARIABLE, SERVICE_VARIABLE, send, wait_gone
from flows.service.record import service_dir
from stages.job_processes import JOB_VARIABLE, end_processes, processes_of, runs

SAVE_SECONDS = 130.0  # for a flow run whose trainer saves: a little more than stop_grace_seconds
SERVER_SECONDS = 5.0
_TEMPORARY = "PREFECT__SERVER_EPHEMERAL"  # Prefect's mark of a server that it started for one process
log = logging.getLogger("athanor.service")

Marked = dict[int, tuple[psutil.Process, Mapping[str, str]]]


@dataclass(slots=True)
class OrphanWatch:
    """Looks for what killed processes of a root have left, and ends it without holding up the one who looks."""

    root: StorePath
    _ending: dict[str, threading.Thread] = field(default_factory=dict)

    def poll(self) -> list[str]:
        """Look once and begin to end what is new; returns what is being ended, in words."""
        self._ending = {name: thread for name, thread in self._ending.items() if thread.is_alive()}
        for name, end in self._orphans():
            if name not in self._ending:
                log.warning("ending %s, whose parent is gone", name)
                self._ending[name] = threading.Thread(target=end, name=f"end {name}", daemon=True)
                self._ending[name].start()
        return list(self._ending)

    def end_all(self) -> int:
        """End everything and return when nothing is left; returns how many there were. Takes as long as saving does."""
        ended: set[str] = set()
        while found := self.poll():
            ended.update(found)
            for thread in self._ending.values():
                thread.join()
        return len(ended)

    def _orphans(self) -> Iterator[tuple[str, Callable[[], None]]]:
        side, marked = side_dir(self.root), marked_processes()
        for flow_run_id, tops in orphaned_flow_runs(side, marked).items():
            yield f"flow run {flow_run_id}", lambda tops=tops: self._stop_once(tops)
        for job in sorted(trainer_jobs(side, marked)):
            if _is_free(_lock_of(job)):
                yield f"trainer {Path(job).name}", lambda job=job: _end_trainer(job)
        for server in orphaned_servers(side, marked):
            yield f"temporary Prefect server {server.pid}", lambda server=server: _stop([server], SERVER_SECONDS)

    def _stop_once(self, tops: list[psutil.Process]) -> None:
        """Only one watch at a time: a second SIGTERM would interrupt the flow run while it lets its trainer save."""
        path = service_dir(self.root) / "ending.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path):
            _stop([process for process in tops if runs(process)], SAVE_SECONDS)


def marked_processes() -> Marked:
    """pid -> (process, environment) of everything that a service, a launcher or Prefect has started."""
    found: Marked = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.keys() & {SERVICE_VARIABLE, JOB_VARIABLE, _TEMPORARY} and runs(process):
                found[process.pid] = (process, environment)
    return found


def orphaned_flow_runs(side: Path, marked: Marked) -> dict[str, list[psutil.Process]]:
    """flow run id -> its outermost processes, where no process of the service is their parent."""
    found: dict[str, list[psutil.Process]] = {}
    for process, environment in marked.values():
        is_ours = environment.get(SERVICE_VARIABLE) == str(side) and JOB_VARIABLE not in environment
        if is_ours and FLOW_RUN_VARIABLE in environment:
            with contextlib.suppress(psutil.Error):
                parent = marked.get(process.ppid())
                if parent is None or parent[1].get(SERVICE_VARIABLE) != str(side):
                    found.setdefault(environment[FLOW_RUN_VARIABLE], []).append(process)
    return found


def living_flow_runs(marked: Marked) -> set[str]:
    """Ids of the flow runs that have a process here, other than a trainer."""
    return {
        environment[FLOW_RUN_VARIABLE]
        for _, environment in marked.values()
        if FLOW_RUN_VARIABLE in environment and JOB_VARIABLE not in environment
    }


def trainer_jobs(side: Path, marked: Marked) -> set[str]:
    """Names of the jobs of this root that have a process here: directories below its scratch directory."""
    scratch = side.resolve() / "scratch"
    names = {environment.get(JOB_VARIABLE, "") for _, environment in marked.values()}
    return {name for name in names if name and scratch in Path(name).parents}


def orphaned_servers(side: Path, marked: Marked) -> list[psutil.Process]:
    """Temporary Prefect servers on this root's database whose flow's process is gone."""
    home = (side / "prefect").resolve()
    servers = [
        process
        for process, environment in marked.values()
        if _TEMPORARY in environment and Path(environment.get("PREFECT_HOME", "")).resolve() == home
    ]
    return [server for server in servers if not _has_flow(server)]


def _has_flow(server: psutil.Process) -> bool:
    """Whether the process that started a temporary server still runs: a Python, where an orphan has init's like."""
    try:
        parent = server.parent()
        return parent is not None and parent.pid != 1 and "python" in Path(parent.exe()).name.lower()
    except psutil.Error:
        return False


def _lock_of(job: str) -> Path:
    """run_stage's lock, which the system frees with the process that holds it; export's job is one level deeper."""
    scratch = next(parent for parent in Path(job).parents if parent.name == "scratch")
    return scratch / f"{Path(job).relative_to(scratch).parts[0]}.lock"


def _is_free(path: Path) -> bool:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    lock.release()
    return True


def _end_trainer(job: str) -> None:
    # Under the lock: a flow that takes up the same work now starts its trainer when the old one has gone.
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(_lock_of(job), timeout=0):
        end_processes(processes_of(job), SAVE_SECONDS)


def _stop(processes: list[psutil.Process], seconds: float) -> None:
    everything = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            # Not a trainer: its flow asks it to save, and one that is alone afterwards is found again.
            everything += [p for p in process.children(recursive=True) if JOB_VARIABLE not in p.environ()]
    send(processes, signal.SIGTERM)
    wait_gone(processes, seconds)
    send([process for process in everything if runs(process)], signal.SIGKILL)
    wait_gone(everything, SERVER_SECONDS)
