"""Processes of a service. They carry the service's mark in their environment, are found by it, and end as groups."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from stages.launchers.processes import runs

SERVICE_VARIABLE = "ATHANOR_SERVICE"
PART_VARIABLE = "ATHANOR_SERVICE_PART"
ROOT_VARIABLE = "ATHANOR_ROOT"
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"  # set by Prefect in the process of a flow run
MAX_LOG_BYTES = 50_000_000
_TAIL_BYTES = 8_000


def start_process(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> subprocess.Popen:
    """Start a program in a session of its own. The program gets SIGTERM when this process ends.

    Must be called in the main thread, because Linux sends the signal when the thread that started the child ends.
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
    """Send SIGTERM to a process and wait for at most `seconds`. Then send SIGKILL to its whole session, even if the
    process has ended already."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def with_environment() -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
    """Yield every other process whose environment this user may read, with that environment. Zombies are left out."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if process.pid != os.getpid() and runs(process):
                yield process, environment


def service_processes(side: Path, part: str | None = None) -> list[psutil.Process]:
    """Return the other processes of a root's service, of one part (prefect, mlflow, worker...) or of all parts.

    Flow runs and the processes that they start carry the mark of the worker.
    """
    return [
        process
        for process, environment in with_environment()
        if environment.get(SERVICE_VARIABLE) == str(side) and part in (None, environment.get(PART_VARIABLE))
    ]


def flow_run_processes(side: Path) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the processes of all flow runs of a service: first the outermost process of each, then all of them."""
    members = {
        process.pid: process
        for process, environment in with_environment()
        if environment.get(SERVICE_VARIABLE) == str(side) and FLOW_RUN_VARIABLE in environment
    }
    tops = []
    for process in members.values():
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in members:
                tops.append(process)
    return tops, list(members.values())


def end_leftovers(side: Path, seconds: float) -> int:
    """End the servers and workers that a killed service has left, and return their number.

    Flow runs are not ended here. `reconcile` ends them and records that in their states.
    """
    leftovers = [
        process
        for process, environment in with_environment()
        if environment.get(SERVICE_VARIABLE) == str(side) and FLOW_RUN_VARIABLE not in environment
    ]
    _end(leftovers, seconds)
    return len(leftovers)


def end_marked(side: Path, part: str | None, seconds: float) -> None:
    """End the processes of one part of a service, or of all parts: SIGTERM, then SIGKILL after `seconds`."""
    _end(service_processes(side, part), seconds)


def _end(processes: list[psutil.Process], seconds: float) -> None:
    send(processes, signal.SIGTERM)
    survivors = wait_gone(processes, seconds)
    send(survivors, signal.SIGKILL)
    wait_gone(survivors, 5)


def send(processes: Iterable[psutil.Process], signum: int) -> None:
    """Send a signal to the processes that are still running."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


def wait_gone(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for at most `seconds` until all processes have ended, and return those that are still running."""
    survivors, deadline = [p for p in processes if runs(p)], time.monotonic() + seconds
    while survivors and time.monotonic() < deadline:
        time.sleep(0.05)
        survivors = [p for p in survivors if runs(p)]
    return survivors


def begin_log(path: Path) -> None:
    """Rename the log of the last start to `<name>.1`, so that a new log can begin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))


def trim_log(path: Path) -> None:
    """Copy a long log to `<name>.1` and empty it. Its writer appends, and so continues at the start of the file."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)


def log_tail(path: Path, lines: int = 8) -> list[str]:
    """Return the last non-empty lines of a log; [] if there is no log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
