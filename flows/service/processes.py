"""Processes of a service: started with its mark in their environment, found by it, ended as groups."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from stages.job_processes import runs

SERVICE_VARIABLE = "ATHANOR_SERVICE"
PART_VARIABLE = "ATHANOR_SERVICE_PART"
ROOT_VARIABLE = "ATHANOR_ROOT"
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"  # set by Prefect in the process of a flow run
MAX_LOG_BYTES = 50_000_000
_TAIL_BYTES = 8_000


def start_process(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> subprocess.Popen:
    """Start a program in a session of its own; it is told to stop when this process is gone.

    Must be called in the main thread: Linux ties the child's life to the thread that starts it.
    """
    leash = [sys.executable, "-m", "flows.service.leash", str(os.getpid())]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [*leash, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def end_process(process: subprocess.Popen, seconds: float) -> None:
    """SIGTERM, so many seconds, SIGKILL to its whole session; an ended one's session is swept as well."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def marked_processes(side: Path, part: str | None = None) -> list[psutil.Process]:
    """Processes of the service of a root, this one left out; of one part (prefect, mlflow, worker...) or of all.

    Flow runs and what they start carry the mark of the worker.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            is_ours = environment.get(SERVICE_VARIABLE) == str(side) and process.pid != os.getpid()
            if is_ours and part in (None, environment.get(PART_VARIABLE)) and runs(process):
                found.append(process)
    return found


def flow_run_processes(side: Path) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The processes of all flow runs of a service: of each the outermost one, and all with what they have started."""
    found = {process.pid: process for process in marked_processes(side, "worker") if _is_flow_run(process)}
    tops = []
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in found:
                tops.append(process)
    return tops, list(found.values())


def end_leftovers(side: Path, seconds: float) -> int:
    """End the servers and the workers that a killed service has left; returns how many processes there were.

    Flow runs are left alone: reconcile() ends them, and says so in their states.
    """
    found = [process for process in marked_processes(side) if not _is_flow_run(process)]
    _end(found, seconds)
    return len(found)


def end_marked(side: Path, part: str | None, seconds: float) -> None:
    """End everything of a part of a service, or of all: SIGTERM, so many seconds, SIGKILL."""
    _end(marked_processes(side, part), seconds)


def _end(processes: list[psutil.Process], seconds: float) -> None:
    send(processes, signal.SIGTERM)
    left = wait_gone(processes, seconds)
    send(left, signal.SIGKILL)
    wait_gone(left, 5)


def _is_flow_run(process: psutil.Process) -> bool:
    """A flow run's process, or one that it has started."""
    with contextlib.suppress(psutil.Error, OSError):
        return FLOW_RUN_VARIABLE in process.environ()
    return False


def send(processes: Iterable[psutil.Process], signum: int) -> None:
    """A signal to those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


def wait_gone(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all have ended, at most so long; returns those that still run."""
    left, deadline = [p for p in processes if runs(p)], time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [p for p in left if runs(p)]
    return left


def begin_log(path: Path) -> None:
    """A fresh log; the one of the last time is kept beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))


def trim_log(path: Path) -> None:
    """A log that has grown long moves aside. The writer keeps its file open, and appends: it goes on at the start."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)


def log_tail(path: Path, lines: int = 8) -> list[str]:
    """The last lines that are not empty."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
