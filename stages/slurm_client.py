"""Calls of Slurm's commands: how a job is, how it ended, tell it to stop. Slurm 20.11 and newer."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.errors import InputError

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
    "TIMEOUT": "reached its time limit before it had saved; raise execution.cluster.slurm.time_limit or signal_seconds",
    "DEADLINE": "reached its deadline",
    "CANCELLED": "was cancelled (scancel)",
    "OUT_OF_MEMORY": "ran out of memory; raise execution.cluster.slurm.memory, or lower plan_bins.seq_len",
    "FAILED": "failed",
    "COMPLETED": "has ended",
}
_UNKNOWN = re.compile(r"Invalid job id", re.IGNORECASE)


class SlurmAway(RuntimeError):
    """A command did not answer, or slurmctld did not: says nothing about the job."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as the queue shows it.

    Attributes:
        state: Slurm's own word, as RUNNING.
        reason: why it waits, or how it ended, in Slurm's words; "None" without one.
        seconds: that the newest try has run.
    """

    job_id: int
    state: str
    name: str
    run_dir: Path
    seconds: float
    nodes: str
    reason: str


def check_installed() -> None:
    """See that Slurm's commands are there.

    Raises:
        InputError: they are not; the text says the way out.
    """
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"execution.cluster.launcher=slurm needs {', '.join(missing)} on PATH: run it on a login node of the "
            "cluster, or take --set execution.cluster.launcher=torchrun for this machine"
        )


def find_job(job_id: int) -> JobState | None:
    """The job as the queue has it, also a while after its end; None where the queue does not know it.

    Raises:
        SlurmAway: no answer.
    """
    found = _queue("--states=all", f"--jobs={job_id}")
    return found[0] if found else None


def find_living(name: str, run_dir: Path) -> JobState | None:
    """A job of ours that has not ended, by its name and working directory.

    Raises:
        SlurmAway: no answer.
    """
    return next((job for job in _queue("--me", f"--name={name}") if job.run_dir == run_dir), None)


def ended_as(job_id: int) -> tuple[str, int] | None:
    """(state, exit status) of an ended job: of slurmctld, or where it has forgotten it of the accounting.

    Raises:
        SlurmAway: no answer.
    """
    shown = _call("scontrol", "show", "job", str(job_id), "--oneliner", unknown="")
    state, status = re.search(r"\bJobState=(\w+)", shown), re.search(r"\bExitCode=(\d+):(\d+)", shown)
    if state and status:
        return state[1], _status(status[1], status[2])
    if shutil.which("sacct") is None:
        return None
    try:
        shown = _call("sacct", "-X", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=State,ExitCode")
    except SlurmAway:  # no accounting here
        return None
    found = re.match(r"(\w+)[^|]*\|(\d+):(\d+)", shown)
    return (found[1], _status(found[2], found[3])) if found else None


def let_save(job_id: int) -> None:
    """SIGTERM to the batch script, which hands it to the ranks, waits for them and ends."""
    _call("scancel", "--quiet", "--batch", "--signal=TERM", str(job_id), unknown="")


def cancel(job_id: int) -> None:
    """SIGTERM to all of the job, and SIGKILL after the cluster's KillWait; a waiting one leaves the queue."""
    _call("scancel", "--quiet", str(job_id), unknown="")


def seconds_of(text: str) -> float:
    """2-03:04:05 or 4:05 of squeue, in seconds; 0 for what is no time."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


def last_line(text: str) -> str:
    """What a failed command said last, without its own name."""
    lines = text.strip().splitlines() or ["no word"]
    return re.sub(r"^\w+: (error: )?", "", lines[-1])


def _queue(*options: str) -> list[JobState]:
    # The working directory last: it is the only one that could hold the separator.
    shown = _call("squeue", "--noheader", "--format=%A|%T|%j|%M|%N|%r|%Z", *options, unknown="")
    rows = [line.split("|", 6) for line in shown.splitlines() if line.count("|") >= 6]
    return [
        JobState(int(job_id), state, name, Path(run_dir), seconds_of(elapsed), nodes, reason)
        for job_id, state, name, elapsed, nodes, reason, run_dir in rows
    ]


def _call(*command: str, unknown: str | None = None) -> str:
    """Standard output; `unknown` instead where Slurm does not know the job."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmAway(f"{command[0]}: {error}") from error
    if done.returncode == 0:
        return done.stdout
    if unknown is not None and _UNKNOWN.search(done.stderr):
        return unknown
    raise SlurmAway(f"{command[0]}: {last_line(done.stderr)}")


def _status(status: str, signal: str) -> int:
    return 128 + int(signal) if int(signal) else int(status)
