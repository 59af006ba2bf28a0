"""A job of the trainer or of the answering workers, and what every launcher does with it: plan, submit, poll, cancel.

No launcher restarts a failed job: run again, by the scheduler or by a retry, it goes on from its checkpoint.
"""

import contextlib
import importlib
import math
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dataset_builders.storage.files import GrowingFile
from stages.launchers.config import ClusterConfig
from stages.launchers.processes import JOB_VARIABLE
from stages.launchers.rank_logs import first_failure, last_lines, log_of_rank

TAIL_LINES = 40
POLL_SECONDS = 0.2
EXIT_DEADLINE = 124  # as timeout(1)
TRAINER_ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run.

    Attributes:
        name: the same for every try of the same work, so that a launcher finds an earlier try's processes or job.
        arguments: of python, after torchrun's own: ("-m", "trainer", "/.../run.json").
        log_path: gets rank 0's output and torchrun's own; other ranks' files lie beside it (rank_logs).
        on_line: called with every line of the log.
    """

    name: str
    arguments: tuple[str, ...]
    log_path: Path
    on_line: Callable[[str], None] = lambda line: None


@dataclass(slots=True, kw_only=True)
class Handle:
    """A submitted job; each launcher adds fields of its own.

    Attributes:
        command: for a person, who could run it.
        why: how the job ended, for a person; empty if its exit status says it.
        lines: the last lines of the log.
    """

    job: Job
    command: list[str]
    why: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def pass_on(self, lines: Iterable[str]) -> None:
        """Remember new lines of the log, and call `on_line` with each."""
        for line in lines:
            self.lines.append(line)
            self.job.on_line(line)

    def pass_on_new(self, log: GrowingFile) -> None:
        """The same with the lines that have come into the job's log."""
        lines = log.new_lines().splitlines()
        log.take()
        self.pass_on(line.decode(errors="replace") for line in lines)


class Launcher(Protocol):
    """A place where jobs run.

    `check` raises InputError if its programs are not installed. `plan` shows what `submit` would run, even if `check`
    fails. `poll` returns None while the job runs, then its exit status; it calls `on_line` with new lines of the log,
    and raises JobFailed (status 124) after the job's deadline. `cancel` lets the job save, ends it and returns when
    nothing of it is left; it does nothing to an ended job.
    """

    def check(self) -> None: ...
    def plan(self, job: Job) -> str: ...
    def submit(self, job: Job) -> Handle: ...
    def poll(self, handle: Handle) -> int | None: ...
    def cancel(self, handle: Handle) -> None: ...


class JobFailed(RuntimeError):
    """A job ended with an error. The text is a line for a person, then the last lines of the job's log; then those of
    the rank that failed first, unless that is rank 0.

    Attributes:
        what: has happened, in words.
        exit_status: of the process that failed first, if torchrun's report names it; otherwise of torchrun.
        rank: of that process.
        log_path: the log of the rank that failed first, or the job's.
        tail: its last lines.
    """

    def __init__(self, what: str, handle: Handle, exit_status: int, rank: int = 0) -> None:
        self.what, self.exit_status, self.rank = what, exit_status, rank
        self.log_path, self.tail = handle.job.log_path, list(handle.lines)
        text = [f"{what}: {shlex.join(handle.command)}", f"full log: {handle.job.log_path}", *handle.lines]
        of_rank = log_of_rank(handle.job.log_path, rank)
        if rank and (tail := last_lines(of_rank, TAIL_LINES)):
            self.log_path, self.tail = of_rank, tail
            text += ["", f"rank {rank} failed first; its log: {of_rank}", *tail]
        super().__init__("\n".join(text))


def timed_out(cluster: ClusterConfig, handle: Handle) -> JobFailed:
    """The error of a job that was cancelled after its deadline."""
    return JobFailed(f"stopped after timeout_seconds={cluster.timeout_seconds:g}", handle, EXIT_DEADLINE)


def rank_environment(cluster: ClusterConfig, name: str) -> dict[str, str]:
    """The variables that every launcher sets for the ranks of the job of this name."""
    # torchrun would give its ranks 30 s to save, whatever the grace.
    grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(cluster.stop_grace_seconds))}
    return {JOB_VARIABLE: name, **TRAINER_ENVIRONMENT, **grace}


LAUNCHERS: dict[str, str] = {
    "torchrun": "stages.launchers.torchrun:TorchrunLauncher",
    "slurm": "stages.launchers.slurm.launcher:SlurmLauncher",
    "kubernetes": "stages.launchers.kubernetes.launcher:KubernetesLauncher",
}


def make_launcher(cluster: ClusterConfig) -> Launcher:
    """The launcher that the configuration names."""
    module, name = LAUNCHERS[cluster.launcher].split(":")
    return getattr(importlib.import_module(module), name)(cluster)


def check_launcher(cluster: ClusterConfig) -> None:
    """Check, before work starts, that jobs can be launched from here.

    Raises:
        InputError: they cannot; the text names what is missing.
    """
    make_launcher(cluster).check()


def run_job(launcher: Launcher, job: Job, on_poll: Callable[[], None] = lambda: None) -> None:
    """Run a job to its end. If anything interrupts the wait, the job may save and is cancelled first.

    Raises:
        JobFailed: the job ended with a status other than 0, or took too long.
    """
    handle = launcher.submit(job)
    try:
        while (status := launcher.poll(handle)) is None:
            on_poll()
            time.sleep(POLL_SECONDS)
        launcher.poll(handle)  # the last lines
    except BaseException:
        with _sigterm_ignored():
            launcher.cancel(handle)
        raise
    finally:
        on_poll()
    launcher.cancel(handle)  # nothing of the job outlives it
    if status:
        rank, worker = first_failure(job.log_path) or (0, status)
        raise JobFailed(handle.why or f"exit status {worker}", handle, worker, rank)


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM while a job saves: whatever stops flows may send it twice, and the second must not cost the
    checkpoint.

    A second Ctrl-C still interrupts: it is a person who will not wait. Only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which scancel would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
