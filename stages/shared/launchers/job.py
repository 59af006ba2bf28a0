"""A job of the trainer or of the answering workers, and the interface of a launcher: plan, submit, poll, cancel.

No launcher restarts a failed job. When the scheduler or a retry runs the job again, it resumes from its checkpoint.

The log files are in one directory, one per rank, named by its global number:

    logs/trainer.log      rank 0, torchrun and the program that starts it
    logs/rank-0001.log    rank 1, and so on
    logs/trainer.log.1    the older half of a log that grew long, on this host

torchrun's own log files are named by the rank's number on its host, in a directory with a random name. Here, a shell
redirects its output and then becomes the rank (`exec`), so that even the output of a crashing interpreter is in the
file.
"""

import contextlib
import math
import re
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import GrowingFile
from dataset_builders.storage.store import home_expanded
from stages.shared.launchers.config import JOB_FILES, ClusterConfig
from stages.shared.launchers.processes import JOB_VARIABLE

TAIL_LINES = 40
POLL_SECONDS = 0.2
EXIT_DEADLINE = 124  # same as timeout(1)
TRAINER_ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}

# $0 is the log directory; the other arguments are the rank's command.
ON_RANK = """\
if [ "$RANK" -gt 0 ]; then exec "$@" >>"$(printf '%s/rank-%04d.log' "$0" "$RANK")" 2>&1; fi
exec "$@\""""
_LAST_BYTES = 400_000
_FAILURE = re.compile(
    r"time\s*: (?P<time>\S+)\s+host\s*: (?P<host>\S+)\s+rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+"
    r"exitcode\s*: (?P<status>-?\d+) \(pid"
)
_SIGTERM = -15


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run.

    Attributes:
        name: the same for every try of the same work, so that a launcher finds the processes or the job of an earlier
            try.
        arguments: arguments of python, after torchrun's own: ("-m", "trainer", "/.../run.json").
        log_path: log with the output of rank 0 and of torchrun; the other ranks' logs are in the same directory.
        on_line: called with every line of the log.
    """

    name: str
    arguments: tuple[str, ...]
    log_path: Path
    on_line: Callable[[str], None] = lambda line: None

    @property
    def run_json(self) -> Path:
        """The file that tells the job's processes what to do; the last argument, whatever the job."""
        return Path(self.arguments[-1])


@dataclass(slots=True, kw_only=True)
class Handle:
    """A submitted job; each launcher's subclass adds fields.

    Attributes:
        command: the command that a user could run instead.
        why: how the job ended, in words; empty if the exit status is enough.
        lines: the last lines of the log.
    """

    job: Job
    command: list[str]
    why: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def pass_on(self, lines: Iterable[str]) -> None:
        """Store new lines of the log, and call `on_line` with each."""
        for line in lines:
            self.lines.append(line)
            self.job.on_line(line)

    def pass_on_new(self, log: GrowingFile) -> None:
        """Pass on the new lines of the job's log file. See `pass_on`."""
        lines = log.new_lines().splitlines()
        log.take()
        self.pass_on(line.decode(errors="replace") for line in lines)


class Launcher(Protocol):
    """The interface of a launcher.

    `check` raises InputError if the launcher's programs are not installed or the job file cannot be used. `plan` shows
    what `submit` would run, even if `check` fails. `poll` returns None while the job runs, then its exit status. It
    calls `on_line` with new lines of the log, and raises JobFailed (status 124) after the job's deadline. `cancel` lets
    the job save, ends it, and returns when no process of it is left; it does nothing to an ended job.

    `submit` first ends what an earlier try of the same work has left, and removes its logs (`remove_rank_logs`). Ranks
    get `rank_environment`; a process without torchrun needs torchrun's variables too. run.json, logs and results go
    through a file system that this process and the ranks see. Whether a request may choose the launcher or a new field
    of it is decided in `flows/service/request.py`.
    """

    def check(self) -> None: ...
    def plan(self, job: Job) -> str: ...
    def submit(self, job: Job) -> Handle: ...
    def poll(self, handle: Handle) -> int | None: ...
    def cancel(self, handle: Handle) -> None: ...


class JobFailed(RuntimeError):
    """A job ended with an error. The text is a line in words, then the last lines of the job's log, then the last lines
    of the rank that failed first, unless that is rank 0.

    Attributes:
        what: what happened, in words.
        exit_status: exit status of the process that failed first, if torchrun's report names it; otherwise torchrun's.
        rank: rank of that process.
        log_path: the log of the rank that failed first, or the job's.
        tail: the last lines of that log.
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
    """Return the error for a job that was cancelled after its deadline."""
    return JobFailed(f"stopped after timeout_seconds={cluster.timeout_seconds:g}", handle, EXIT_DEADLINE)


def rank_environment(cluster: ClusterConfig, name: str) -> dict[str, str]:
    """Return the environment variables that every launcher sets for the ranks of the job of this name."""
    # Without this variable, torchrun gives its ranks only 30 s to save.
    grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(cluster.stop_grace_seconds))}
    return {JOB_VARIABLE: name, **TRAINER_ENVIRONMENT, **grace}


LAUNCHERS: dict[str, str] = {  # by name, so that a run on this host imports neither jinja2 nor kubernetes
    "torchrun": "stages.shared.launchers.torchrun:TorchrunLauncher",
    "slurm": "stages.shared.launchers.slurm:SlurmLauncher",
    "kubernetes": "stages.shared.launchers.kubernetes:KubernetesLauncher",
}


def make_launcher(cluster: ClusterConfig) -> Launcher:
    """Return the launcher that the config names."""
    return resolve_name(LAUNCHERS[cluster.launcher])(cluster)


def read_job_file(cluster: ClusterConfig) -> str:
    """Return the text of the user's job file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return home_expanded(str(cluster.job_file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"execution.cluster.job_file={cluster.job_file} cannot be read ({one_line(error)}); give the path of "
            f"{JOB_FILES[cluster.launcher]}"
        ) from error


def check_launcher(cluster: ClusterConfig) -> None:
    """Check, before work starts, that jobs can be launched from this machine.

    Raises:
        InputError: they cannot be launched; the text names the missing program, or the wrong line of the job file.
    """
    make_launcher(cluster).check()


def run_job(launcher: Launcher, job: Job, on_poll: Callable[[], None] = lambda: None) -> None:
    """Run a job to its end. If the wait is interrupted, the job is cancelled, with time to save.

    Raises:
        JobFailed: the job ended with a status other than 0, or took too long.
    """
    handle = launcher.submit(job)
    try:
        while (status := launcher.poll(handle)) is None:
            on_poll()
            time.sleep(POLL_SECONDS)
        launcher.poll(handle)  # reads the last lines of the log
    except BaseException:
        with _sigterm_ignored():
            launcher.cancel(handle)
        raise
    finally:
        on_poll()
    launcher.cancel(handle)  # no process of the job may outlive it
    if status:
        rank, worker = first_failure(job.log_path) or (0, status)
        raise JobFailed(handle.why or f"exit status {worker}", handle, worker, rank)


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM while a job saves: a flow may get the signal twice, and the second one must not lose the
    checkpoint.

    A second Ctrl-C still interrupts, because the user does not want to wait. Only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which scancel would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def as_rank(log_dir: Path, command: Iterable[str]) -> list[str]:
    """Return the command that torchrun runs as each rank, after its option --no-python."""
    return ["/bin/sh", "-c", ON_RANK, str(log_dir), *command]


def log_of_rank(log_path: Path, rank: int) -> Path:
    """Return the path of a rank's log; the job's log is rank 0's."""
    return log_path if rank == 0 else log_path.with_name(f"rank-{rank:04d}.log")


def remove_rank_logs(log_path: Path) -> None:
    """Remove the ranks' logs of an earlier try, and the older halves of its long logs."""
    for path in (*log_path.parent.glob("rank-*.log"), *log_path.parent.glob("*.log.1")):
        path.unlink()


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log; empty if there is no file."""
    return _end_of(path).splitlines()[-count:]


def first_failure(log_path: Path) -> tuple[int, int] | None:
    """Return the rank that failed first and its exit status, from torchrun's reports in the log; None without a report.

    Every host's torchrun reports its own ranks, with a resolution of a second. Within one second, a rank that was ended
    by a signal counts as first: ranks that lose their peer fail with an exit status. Ranks that torchrun stops with
    SIGTERM are never the cause.
    """
    failures = [m.groupdict() for m in _FAILURE.finditer(_end_of(log_path))]
    if not failures:
        return None
    first = min(failures, key=lambda f: (int(f["status"]) == _SIGTERM, f["time"], int(f["status"]) > 0))
    return int(first["rank"]), int(first["status"])


def _end_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        return file.read().decode("utf-8", errors="replace")
