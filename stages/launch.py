"""Start the trainer as a job of its own: plan, submit, poll, cancel, logs. Here: torchrun on this host.

A job's processes carry its name in their environment, because torchrun gives every worker a session of its own:
killing torchrun's process group would leave the workers, and a name also finds what a killed parent left behind.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import psutil
from pydantic import Field

from dataset_builders.contracts.strict import StrictModel

JOB_VARIABLE = "ATHANOR_JOB"
TAIL_LINES = 40
POLL_SECONDS = 0.2
LEFTOVER_SECONDS = 3.0  # for torchrun and the workers' helpers to follow, once the workers are gone


class ClusterConfig(StrictModel):
    """Execution: where the trainer runs and how many processes it has."""

    launcher: Literal["torchrun"] = Field(default="torchrun", description="torchrun: processes on this host")
    processes: int = Field(default=1, ge=1, description="trainer processes; one a GPU, or any number on CPU")
    num_threads: int = Field(default=0, ge=0, description="CPU threads of a process; 0 shares the cores among them")
    timeout_seconds: float = Field(default=7 * 86400, gt=0, description="a job that takes longer is stopped")
    stop_grace_seconds: float = Field(default=120, gt=0, description="time to save after SIGTERM, before SIGKILL")


@dataclass(frozen=True, slots=True)
class Job:
    """What to run. `name` must be the same for every try of the same work: an earlier try's leftovers are ended."""

    name: str
    arguments: tuple[str, ...]
    log_path: Path
    on_line: Callable[[str], None] = lambda line: None


@dataclass(slots=True)
class Handle:
    """A submitted job. `lines` holds the last ones of the log."""

    job: Job
    command: list[str]
    process: subprocess.Popen
    deadline: float
    reader: Iterator[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class Launcher(Protocol):
    """A place where jobs run. `poll` returns None while the job runs, then its exit status."""

    def plan(self, job: Job) -> str: ...
    def submit(self, job: Job) -> Handle: ...
    def poll(self, handle: Handle) -> int | None: ...
    def cancel(self, handle: Handle) -> None: ...
    def logs(self, handle: Handle) -> list[str]: ...


class JobFailed(RuntimeError):
    """A job ended with an error: first a line for a person, then the log's last lines.

    Attributes:
        exit_status: of the process that failed first, as far as torchrun's log names it; else of torchrun.
    """

    def __init__(self, what: str, handle: Handle, exit_status: int) -> None:
        super().__init__(
            f"{what}: {shlex.join(handle.command)}\nfull log: {handle.job.log_path}\n" + "\n".join(handle.lines)
        )
        self.exit_status = exit_status


class TorchrunLauncher:
    """torchrun on this host, never restarting by itself: a failed run goes on from its checkpoint when run again."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    def command(self, job: Job) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
        return [sys.executable, *torchrun, f"--nproc-per-node={self.cluster.processes}", *job.arguments]

    def plan(self, job: Job) -> str:
        """The command line that `submit` would run."""
        return shlex.join(self.command(job))

    def submit(self, job: Job) -> Handle:
        """Start the job; the log file is begun anew and everything the job prints goes there."""
        _end(_processes_of(job.name), self.cluster.stop_grace_seconds)
        command = self.command(job)
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        # A file, not a pipe: a job that prints is never stopped by a parent that does not read, or is gone.
        with job.log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(job.name),
                start_new_session=True,
            )
        deadline = time.monotonic() + self.cluster.timeout_seconds
        return Handle(job, command, process, deadline, _new_lines(job.log_path))

    def poll(self, handle: Handle) -> int | None:
        """None while it runs; hands new lines of the log to `on_line`.

        Raises:
            JobFailed: the deadline has passed; the job is cancelled before.
        """
        status = handle.process.poll()
        for line in handle.reader:
            if line == _NOTHING_NEW:
                break
            handle.lines.append(line)
            handle.job.on_line(line)
        if status is None and time.monotonic() > handle.deadline:
            self.cancel(handle)
            raise JobFailed(f"stopped after timeout_seconds={self.cluster.timeout_seconds:g}", handle, 124)
        return status

    def cancel(self, handle: Handle) -> None:
        """SIGTERM to the workers, time to save, then SIGKILL to whatever is left. Does nothing to an ended job."""
        # A process shows no environment for the instant of its exec: the one we started is known, and a second
        # look finds what a worker was starting during the first.
        _end([*_own(handle.process), *_processes_of(handle.job.name)], self.cluster.stop_grace_seconds)
        _end(_processes_of(handle.job.name), LEFTOVER_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            handle.process.wait(10)

    def logs(self, handle: Handle) -> list[str]:
        """The whole log so far, line by line."""
        return handle.job.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def _environment(self, name: str) -> Mapping[str, str]:
        threads = self.cluster.num_threads or max(1, (os.cpu_count() or 1) // self.cluster.processes)
        defaults = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        fixed = {
            JOB_VARIABLE: name,
            "DO_NOT_TRACK": "true",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        return {**defaults, **os.environ, **fixed}


LAUNCHERS: dict[str, type[TorchrunLauncher]] = {"torchrun": TorchrunLauncher}


def make_launcher(cluster: ClusterConfig) -> Launcher:
    """The launcher that the configuration names."""
    return LAUNCHERS[cluster.launcher](cluster)


def run_job(launcher: Launcher, job: Job, on_poll: Callable[[], None] = lambda: None) -> None:
    """Run a job to its end; whatever interrupts the wait, the job is cancelled (and may save) before it goes on.

    Raises:
        JobFailed: the job ended with another status than 0, or took too long.
    """
    handle = launcher.submit(job)
    try:
        while (status := launcher.poll(handle)) is None:
            on_poll()
            time.sleep(POLL_SECONDS)
        launcher.poll(handle)  # the last lines
    except BaseException:
        launcher.cancel(handle)
        raise
    finally:
        on_poll()
    launcher.cancel(handle)  # nothing of the job outlives it
    if status:
        worker = _worker_status(list(handle.lines))
        raise JobFailed(f"exit status {worker or status}", handle, worker or status)


_NOTHING_NEW = "\0nothing new"


def _new_lines(path: Path) -> Iterator[str]:
    """Whole lines as they come; `_NOTHING_NEW` where the file ends for now."""
    part = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            part += file.readline()
            if part.endswith("\n"):
                yield part.rstrip("\n")
                part = ""
            else:
                yield _NOTHING_NEW


def _worker_status(lines: list[str]) -> int | None:
    """The exit status of the worker that failed first, which torchrun reports but does not pass on."""
    found = [match for line in lines if (match := re.search(r"exitcode\s*:\s*(-?\d+)\s*\(pid", line))]
    return int(found[-1].group(1)) if found else None


def _processes_of(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB_VARIABLE) == name and process.pid != os.getpid():
                found.append(process)
    return found


def _own(process: subprocess.Popen) -> list[psutil.Process]:
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            return [psutil.Process(process.pid)]
    return []


def _end(processes: list[psutil.Process], grace_seconds: float) -> None:
    """SIGTERM to the workers, wait for them, SIGKILL to whatever is left. An interrupted wait kills at once."""
    workers = _workers(processes)
    try:
        for process in workers:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        _wait_gone(workers, grace_seconds)
        _wait_gone(processes, LEFTOVER_SECONDS)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_gone(processes, LEFTOVER_SECONDS)


def _wait_gone(processes: list[psutil.Process], seconds: float) -> None:
    # psutil.wait_procs would reap our own child and with it the exit status that Popen reports.
    deadline = time.monotonic() + seconds
    while any(_runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Whom to ask to stop: the trainer's ranks; not their helpers, which they end themselves.

    Nor torchrun, which would cut its workers' grace to 30 s and ends when they have; alone, it is asked.
    """
    agents, parents = set(), {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            if "torch.distributed.run" in process.cmdline():
                agents.add(process.pid)
    tops = [p for p in processes if p.pid not in agents and parents.get(p.pid) not in parents.keys() - agents]
    return tops or processes
