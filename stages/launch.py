"""Start the trainer as a job of its own: plan, submit, poll, cancel, logs. Where it runs is in launch_<launcher>.py.

A failed job is never restarted here: run again, by the scheduler or by a retry, it goes on from its checkpoint.
"""

import contextlib
import importlib
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stages.cluster_config import ClusterConfig
from stages.rank_logs import first_failure, last_lines, log_of_rank

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
    """What to run. `name` must be the same for every try of the same work: an earlier try's leftovers are ended, or
    found again.

    Attributes:
        arguments: of python, after torchrun's own: ("-m", "trainer", "/.../run.json").
        log_path: gets rank 0's output and torchrun's own; other ranks' files lie beside it (rank_logs).
        on_line: hears of every line of it.
    """

    name: str
    arguments: tuple[str, ...]
    log_path: Path
    on_line: Callable[[str], None] = lambda line: None


@dataclass(slots=True, kw_only=True)
class Handle:
    """A submitted job; a launcher adds what it needs. `lines` holds the last ones of the log.

    Attributes:
        why: how the job ended, for a person, where its exit status does not say it.
    """

    job: Job
    command: list[str]
    why: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class Launcher(Protocol):
    """A place where jobs run. `poll` returns None while the job runs, then its exit status; it hands new lines of the
    log to `on_line` and keeps the job's deadline (JobFailed, with status 124).

    `check` sees that its programs are here (InputError). `plan` shows what `submit` would run, without running it, also
    where `check` fails. `cancel` lets the job save, ends it and returns when
    nothing of it is left; it does nothing to an ended job.
    """

    def check(self) -> None: ...
    def plan(self, job: Job) -> str: ...
    def submit(self, job: Job) -> Handle: ...
    def poll(self, handle: Handle) -> int | None: ...
    def cancel(self, handle: Handle) -> None: ...
    def logs(self, handle: Handle) -> list[str]: ...


class JobFailed(RuntimeError):
    """A job ended with an error: first a line for a person, then the last lines of the log, and of the log of the rank
    that failed first where that is not rank 0.

    Attributes:
        what: has happened, in words.
        exit_status: of the process that failed first, as far as torchrun's report names it; else of torchrun.
        rank: that process.
        log_path: the log that says most: of the rank that failed first, or the job's.
        tail: its last lines.
    """

    def __init__(self, what: str, handle: Handle, exit_status: int, rank: int = 0) -> None:
        self.what, self.exit_status, self.rank = what, exit_status, rank
        self.log_path, self.tail = handle.job.log_path, list(handle.lines)
        text = [f"{what}: {shlex.join(handle.command)}", f"full log: {handle.job.log_path}", *handle.lines]
        of_rank = log_of_rank(handle.job.log_path, rank)
        if rank and (found := last_lines(of_rank, TAIL_LINES)):
            self.log_path, self.tail = of_rank, found
            text += ["", f"rank {rank} failed first; its log: {of_rank}", *found]
        super().__init__("\n".join(text))


LAUNCHERS: dict[str, str] = {
    "torchrun": "stages.launch_torchrun:TorchrunLauncher",
    "slurm": "stages.launch_slurm:SlurmLauncher",
    "kubernetes": "stages.launch_kubernetes:KubernetesLauncher",
}


def make_launcher(cluster: ClusterConfig) -> Launcher:
    """The launcher that the configuration names."""
    module, name = LAUNCHERS[cluster.launcher].split(":")
    return getattr(importlib.import_module(module), name)(cluster)


def check_launcher(cluster: ClusterConfig) -> None:
    """See that jobs can be launched from here, before work starts.

    Raises:
        InputError: they cannot; the text says what is missing.
    """
    make_launcher(cluster).check()


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
    """While a job saves: whoever stops flows may say so twice, and the second time must not cost the checkpoint.

    Ctrl-C a second time is a person who will not wait, and still interrupts. Only the main thread hears signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which scancel and kubectl would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
