"""Start the trainer as a job of its own: plan, submit, poll, cancel, logs. Where it runs is in launch_<launcher>.py.

A failed job is never restarted here: run again, by the scheduler or by a retry, it goes on from its checkpoint.
"""

import importlib
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stages.cluster_config import ClusterConfig

TAIL_LINES = 40
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """What to run. `name` must be the same for every try of the same work: an earlier try's leftovers are ended, or
    found again.

    Attributes:
        arguments: of python, after torchrun's own: ("-m", "trainer", "/.../run.json").
        log_path: gets rank 0's output and what the launcher itself prints; other ranks' files lie beside it.
        on_line: hears of every line of it.
    """

    name: str
    arguments: tuple[str, ...]
    log_path: Path
    on_line: Callable[[str], None] = lambda line: None


@dataclass(slots=True, kw_only=True)
class Handle:
    """A submitted job; a launcher adds what it needs. `lines` holds the last ones of the log."""

    job: Job
    command: list[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class Launcher(Protocol):
    """A place where jobs run. `poll` returns None while the job runs, then its exit status; it hands new lines of the
    log to `on_line` and keeps the job's deadline (JobFailed, with status 124).

    `plan` shows what `submit` would run, without running it. `cancel` lets the job save, ends it and returns when
    nothing of it is left; it does nothing to an ended job.
    """

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


LAUNCHERS: dict[str, str] = {
    "torchrun": "stages.launch_torchrun:TorchrunLauncher",
    "slurm": "stages.launch_slurm:SlurmLauncher",
    "kubernetes": "stages.launch_kubernetes:KubernetesLauncher",
}


def make_launcher(cluster: ClusterConfig) -> Launcher:
    """The launcher that the configuration names."""
    module, name = LAUNCHERS[cluster.launcher].split(":")
    return getattr(importlib.import_module(module), name)(cluster)


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


NOTHING_NEW = "\0nothing new"


def new_lines(path: Path) -> Iterator[str]:
    """Whole lines as they come; `NOTHING_NEW` where the file ends for now."""
    part = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            part += file.readline()
            if part.endswith("\n"):
                yield part.rstrip("\n")
                part = ""
            else:
                yield NOTHING_NEW


def _worker_status(lines: list[str]) -> int | None:
    """The exit status of the worker that failed first, which torchrun reports but does not pass on."""
    found = [match for line in lines if (match := re.search(r"exitcode\s*:\s*(-?\d+)\s*\(pid", line))]
    return int(found[-1].group(1)) if found else None
