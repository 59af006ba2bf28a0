"""Calls of Slurm's commands: a job's state, its end, its cancellation. For Slurm 20.11 and newer."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.errors import InputError

CALL_SECONDS = 60.0
_NEEDED = ("sbatch", "squeue", "scancel", "scontrol")
ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED"),
}
MAY_RETURN = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
RUNS = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
WORDS = {
    "PENDING": "waits for its turn",
    "CONFIGURING": "its nodes are made ready",
    "RUNNING": "runs",
    "COMPLETING": "is ending",
    "SUSPENDED": "is suspended by the cluster",
    "REQUEUED": "is queued again, and goes on from its checkpoint",
    "REQUEUE_HOLD": "is queued again and held; release it with: scontrol release {id}",
    "SPECIAL_EXIT": "is held; release it with: scontrol release {id}",
    "PREEMPTED": "had to make room for another job",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "got a node that did not boot",
    "TIMEOUT": "reached its time limit before it had saved; raise --time, or --signal's seconds, in the job file",
    "DEADLINE": "reached its deadline",
    "CANCELLED": "was cancelled (scancel)",
    "OUT_OF_MEMORY": "ran out of memory; raise --mem in the job file, or lower plan_bins.seq_len",
    "FAILED": "failed",
    "COMPLETED": "has ended",
}
_UNKNOWN = re.compile(r"Invalid job id", re.IGNORECASE)


class SlurmAway(RuntimeError):
    """A command, or slurmctld, did not answer; the job's state is unknown."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state in the queue.

    Attributes:
        state: Slurm's name of the state, such as RUNNING.
        seconds: running time of the newest try.
        reason: why it waits, or how it ended, in Slurm's words; "None" if there is no reason.
    """

    job_id: int
    state: str
    name: str
    run_dir: Path
    seconds: float
    nodes: str
    reason: str


def check_installed() -> None:
    """Check that Slurm's commands are installed.

    Raises:
        InputError: a command is missing.
    """
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"execution.cluster.launcher=slurm needs {', '.join(missing)} on PATH: run it on a login node of the "
            "cluster, or take --set execution.cluster.launcher=torchrun for this machine"
        )


def find_job(job_id: int) -> JobState | None:
    """Return the job's state in the queue, where it stays for a while after its end; None if the queue does not know
    it.

    Raises:
        SlurmAway: Slurm does not answer.
    """
    return next(iter(_queue("--states=all", f"--jobs={job_id}")), None)


def find_living(name: str, run_dir: Path) -> JobState | None:
    """Find a job of this user that has not ended, by its name and working directory; None if there is none.

    Raises:
        SlurmAway: Slurm does not answer.
    """
    return next((job for job in _queue("--me", f"--name={name}") if job.run_dir == run_dir), None)


def ended_as(job_id: int) -> tuple[str, int] | None:
    """Return (state, exit status) of an ended job, from slurmctld, or from the accounting if slurmctld no longer knows
    the job; None if neither knows it.

    Raises:
        SlurmAway: Slurm does not answer.
    """
    shown = _call("scontrol", "show", "job", str(job_id), "--oneliner", unknown="")
    state, status = re.search(r"\bJobState=(\w+)", shown), re.search(r"\bExitCode=(\d+):(\d+)", shown)
    if state and status:
        return state[1], _status(status[1], status[2])
    if shutil.which("sacct") is None:
        return None
    try:
        shown = _call("sacct", "-X", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=State,ExitCode")
    except SlurmAway:  # the cluster has no accounting
        return None
    row = re.match(r"(\w+)[^|]*\|(\d+):(\d+)", shown)
    return (row[1], _status(row[2], row[3])) if row else None


def let_save(job_id: int) -> None:
    """Send SIGTERM to the batch script, which passes it to the ranks, waits for them and ends."""
    _call("scancel", "--quiet", "--batch", "--signal=TERM", str(job_id), unknown="")


def cancel(job_id: int) -> None:
    """Send SIGTERM to the whole job, and SIGKILL after the cluster's KillWait; a waiting job leaves the queue."""
    _call("scancel", "--quiet", str(job_id), unknown="")


def seconds_of(text: str) -> float:
    """Convert squeue's time (2-03:04:05 or 4:05) to seconds; 0 for any other text."""
    time = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if time is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in time.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


def last_line(text: str) -> str:
    """Return the last line that a failed command printed, without the command's name."""
    lines = text.strip().splitlines() or ["no word"]
    return re.sub(r"^\w+: (error: )?", "", lines[-1])


def _queue(*options: str) -> list[JobState]:
    # The working directory is last, because only it may contain the separator.
    shown = _call("squeue", "--noheader", "--format=%A|%T|%j|%M|%N|%r|%Z", *options, unknown="")
    rows = [line.split("|", 6) for line in shown.splitlines() if line.count("|") >= 6]
    return [
        JobState(int(job_id), state, name, Path(run_dir), seconds_of(elapsed), nodes, reason)
        for job_id, state, name, elapsed, nodes, reason, run_dir in rows
    ]


def _call(*command: str, unknown: str | None = None) -> str:
    """Return the command's standard output; `unknown`, if given, for a job that Slurm does not know."""
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmAway(f"{command[0]}: {error}") from error
    if result.returncode == 0:
        return result.stdout
    if unknown is not None and _UNKNOWN.search(result.stderr):
        return unknown
    raise SlurmAway(f"{command[0]}: {last_line(result.stderr)}")


def _status(status: str, signal: str) -> int:
    return 128 + int(signal) if int(signal) else int(status)
