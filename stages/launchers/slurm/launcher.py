"""The launcher for SLURM: renders an sbatch file, stores it next to run.json and submits it; the queue gives the job's
state.

The flow and the nodes see the root at the same path, so metrics, result and logs are exchanged through it. A job that a
killed flow left in the queue is found again by name and directory, and the next try waits for it instead of submitting
a second job. The launcher's own messages go to `on_line` and not into the log, which the nodes write.
"""

import hashlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dataset_builders.errors import InputError
from dataset_builders.storage.files import GrowingFile, write_json, write_text
from stages.launchers.config import ClusterConfig
from stages.launchers.job import Handle, Job, JobFailed, timed_out
from stages.launchers.rank_logs import remove_rank_logs
from stages.launchers.slurm import client as slurm
from stages.launchers.slurm.client import JobState, SlurmAway
from stages.launchers.slurm.header import read_header
from stages.launchers.slurm.script import END_FILE, SBATCH_FILE, job_name, render_sbatch, run_dir_of
from trainer.contract.names import EXIT_STOPPED

SLURM_JSON = "slurm.json"
LOOK_SECONDS = 5.0  # between two looks at the queue
OUTAGE_SECONDS = 3600.0  # if the queue does not answer for this time, the job counts as lost
SUBMIT_SECONDS = 120.0  # waiting time for a slurmctld that does not answer, before the job exists
CANCEL_SECONDS = 90.0  # time for Slurm's own SIGTERM and SIGKILL, after the time to save
RETURN_SECONDS = 30.0  # time in which a job that lost its node may be queued again
VISIBLE_SECONDS = 30.0  # time for a shared file system to show a node's files here
log = logging.getLogger("athanor.slurm")
Answer = TypeVar("Answer")


@dataclass(slots=True, kw_only=True)
class SlurmHandle(Handle):
    """A job in the queue. Times are from time.monotonic().

    Attributes:
        status: the exit status, after the job has ended.
        ran_seconds: running time in all tries, as far as this launcher observed it.
        last_look, next_look, last_answer: times of queries of the queue, and of its last answer.
        ended_at: time when the queue first showed the job as ended.
        message: the launcher's newest message.
    """

    job_id: int
    log: GrowingFile
    status: int | None = None
    ran_seconds: float = 0.0
    last_look: float = field(default_factory=time.monotonic)
    next_look: float = 0.0
    last_answer: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    was_running: bool = False
    message: str = ""


class SlurmLauncher:
    """The launcher of SLURM jobs: sbatch -> srun -> torchrun. Only Slurm restarts a job, and the trainer resumes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    def check(self) -> None:
        """Check that Slurm is installed and that the header fits the run.

        Raises:
            InputError: a command of Slurm is missing, or a line of the header is wrong.
        """
        slurm.check_installed()
        read_header(self.cluster)

    def plan(self, job: Job) -> str:
        """Return the sbatch file that `submit` would submit."""
        return render_sbatch(self.cluster, job)

    def submit(self, job: Job) -> SlurmHandle:
        """Submit the job, or wait for a live job with the same content.

        Raises:
            InputError: Slurm is not installed, or it refuses the job.
        """
        self.check()
        run_dir, script = run_dir_of(job), self.plan(job)
        digest = _digest(script, job)
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        living = _patiently(lambda: slurm.find_living(job_name(job), run_dir))
        if living is not None:
            handle = self._handle(job, living.job_id)
            if _living_digest(run_dir) == digest:
                handle.ran_seconds = living.seconds
                _say(handle, f"job {living.job_id} is there already ({living.state}); waiting for it")
                return handle
            _say(handle, f"job {living.job_id} has other settings; it will save and end")
            self.cancel(handle)
        remove_rank_logs(job.log_path)
        job.log_path.write_text("")
        write_text(run_dir / SBATCH_FILE, script)
        write_json(run_dir / SLURM_JSON, {"asked": digest, "job_id": None})
        job_id = _patiently(lambda: _sbatch(run_dir / SBATCH_FILE))
        write_json(run_dir / SLURM_JSON, {"asked": digest, "job_id": job_id})
        handle = self._handle(job, job_id)
        _say(handle, f"job {job_id} submitted")
        return handle

    def poll(self, handle: SlurmHandle) -> int | None:
        """Return the exit status, None while the job waits or runs; pass on new lines of the log.

        Raises:
            JobFailed: the job ran longer than the deadline and was cancelled, or the queue has not answered for an
                hour.
        """
        handle.pass_on_new(handle.log)
        if handle.status is not None or time.monotonic() < handle.next_look:
            return handle.status
        handle.next_look = time.monotonic() + LOOK_SECONDS
        try:
            self._look(handle)
            handle.last_answer = time.monotonic()
        except SlurmAway as error:
            self._tolerate_outage(handle, error)
        if handle.status is None and handle.ran_seconds > self.cluster.timeout_seconds:
            self.cancel(handle)
            raise timed_out(self.cluster, handle)
        handle.pass_on_new(handle.log)
        return handle.status

    def cancel(self, handle: SlurmHandle) -> None:
        """Let the ranks save, then end the job and wait for its end. Does nothing to an ended job."""
        kill_at = time.monotonic() + self.cluster.stop_grace_seconds
        is_saving = is_killed = False
        while handle.status is None and time.monotonic() < kill_at + CANCEL_SECONDS:
            try:
                job = slurm.find_job(handle.job_id)
                if job is None or job.state in slurm.ENDED:
                    self._end(handle, job, time.monotonic() - VISIBLE_SECONDS)
                elif job.state not in slurm.RUNS or time.monotonic() > kill_at:
                    is_killed or slurm.cancel(handle.job_id)
                    is_killed = job.state in slurm.RUNS  # a job that is requeued meanwhile is cancelled again
                elif not is_saving:
                    slurm.let_save(handle.job_id)
                    is_saving = True
            except SlurmAway as error:
                _say(handle, f"{error}; trying again to cancel job {handle.job_id}")
            handle.pass_on_new(handle.log)
            if handle.status is None:
                time.sleep(min(0.5, LOOK_SECONDS))
        if handle.status is None:
            log.error("SLURM job %d was not seen to end; end it with: scancel %d", handle.job_id, handle.job_id)

    def _handle(self, job: Job, job_id: int) -> SlurmHandle:
        command = ["sbatch", str(run_dir_of(job) / SBATCH_FILE)]
        return SlurmHandle(job=job, command=command, job_id=job_id, log=GrowingFile(job.log_path))

    def _look(self, handle: SlurmHandle) -> None:
        """Query the queue once: report the job's state, add up its running time, detect its end."""
        job, now = slurm.find_job(handle.job_id), time.monotonic()
        if handle.was_running:
            handle.ran_seconds += now - handle.last_look
        handle.was_running, handle.last_look = job is not None and job.state == "RUNNING", now
        if job is not None:
            _say_state(handle, job)
        if job is not None and job.state not in slurm.ENDED:
            handle.ended_at = None
            return
        handle.ended_at = handle.ended_at or now
        may_return = job is not None and job.state in slurm.MAY_RETURN and now - handle.ended_at < RETURN_SECONDS
        if not may_return:
            self._end(handle, job, handle.ended_at)
        handle.next_look = min(handle.next_look, now + 0.5)

    def _end(self, handle: SlurmHandle, job: JobState | None, ended_at: float) -> None:
        """Set the exit status, after the files of the job's nodes are visible here.

        The job writes its exit status last: when that file is visible, all earlier files are visible too.
        """
        own = _end_status(handle)
        has_run = job is None or job.seconds > 0
        wait = VISIBLE_SECONDS if job is not None and job.state == "COMPLETED" else VISIBLE_SECONDS / 6
        if own is None and has_run and time.monotonic() - ended_at < wait:
            return
        state, status = slurm.ended_as(handle.job_id) or (job.state if job else "", own)
        if status is None:
            status = 1
            handle.why = (
                f"SLURM job {handle.job_id} is gone without an exit status; see its log, or sacct -j {handle.job_id}"
            )
        elif state not in ("COMPLETED", "FAILED", ""):
            status = status or (143 if state == "CANCELLED" else 1)
            handle.why = f"SLURM job {handle.job_id} is {state}: it {slurm.WORDS.get(state, 'did not finish')}"
        elif state == "FAILED" and own is None and not handle.lines:
            handle.why = (
                f"SLURM job {handle.job_id} failed before it could write {handle.job.log_path}; "
                "does the first node see the root? It must lie on a file system that all nodes share"
            )
        handle.status = EXIT_STOPPED if own == EXIT_STOPPED else status

    def _tolerate_outage(self, handle: SlurmHandle, error: SlurmAway) -> None:
        """Log that the queue does not answer; the job continues. After OUTAGE_SECONDS, raise JobFailed."""
        _say(handle, f"{error}; the job goes on, asking again")
        silent = time.monotonic() - handle.last_answer
        if silent > OUTAGE_SECONDS:
            what = f"no answer about SLURM job {handle.job_id} for {silent:.0f} s; run again to go on waiting for it"
            raise JobFailed(what, handle, 1) from error


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """Call `ask` until slurmctld, which may be restarting, answers.

    Raises:
        InputError: slurmctld has not answered for SUBMIT_SECONDS.
    """
    until = time.monotonic() + SUBMIT_SECONDS
    while True:
        try:
            return ask()
        except SlurmAway as error:
            if time.monotonic() > until:
                raise InputError(
                    f"Slurm does not answer ({error}); see sinfo, then run the same command again"
                ) from error
            log.warning("%s; trying again", error)
            time.sleep(1)


def _sbatch(script: Path) -> int:
    """Submit this file, and return the job's id."""
    command = ["sbatch", "--parsable", str(script)]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmAway(f"sbatch: {error}") from error
    if result.returncode == 0:
        return int(result.stdout.strip().partition(";")[0])
    reason = slurm.last_line(result.stderr)
    if re.search(r"contact slurm controller|timed out|temporarily|try again|Socket", reason, re.IGNORECASE):
        raise SlurmAway(f"sbatch: {reason}")
    raise InputError(f"sbatch refuses {script}: {reason}; see execution.cluster.job_file and `sinfo`")


def _environment() -> Mapping[str, str]:
    """Return sbatch's environment: without options in variables, and without variables of a job that runs the flow."""
    own = re.compile(r"SBATCH_|SLURM_(?!CONF$)")
    return {name: value for name, value in os.environ.items() if not own.match(name)}


def _digest(script: str, job: Job) -> str:
    """Return 16 hex digits over a job's content: the sbatch file and run.json."""
    run_json = Path(job.arguments[-1])
    content = run_json.read_bytes() if run_json.is_file() else b""
    return hashlib.sha256(script.encode() + b"\0" + content).hexdigest()[:16]


def _living_digest(run_dir: Path) -> str | None:
    """Return the digest of the job that was submitted last; None if there is none."""
    path = run_dir / SLURM_JSON
    match = re.search(r'"asked": "(\w+)"', path.read_text(encoding="utf-8")) if path.is_file() else None
    return match[1] if match else None


def _end_status(handle: SlurmHandle) -> int | None:
    """Return the exit status that the job wrote; None while the file is not visible, or if another job wrote it."""
    run_dir = run_dir_of(handle.job)
    if END_FILE not in os.listdir(run_dir):  # a listing comes from the server; a lookup may be cached
        return None
    match = re.fullmatch(r"(\d+) (\d+)\s*", (run_dir / END_FILE).read_text())
    return int(match[2]) if match and int(match[1]) == handle.job_id else None


def _say_state(handle: SlurmHandle, job: JobState) -> None:
    words = slurm.WORDS.get(job.state, "").format(id=job.job_id)
    reason = f" ({job.reason})" if job.reason not in ("None", "") else ""
    nodes = f" on {job.nodes}" if job.nodes and job.state == "RUNNING" else ""
    _say(handle, f"job {job.job_id} is {job.state}{reason}: it {words or 'goes on'}{nodes}")


def _say(handle: SlurmHandle, text: str) -> None:
    """Pass on a message of the launcher, unless it equals the last one."""
    if text != handle.message:
        handle.message = text
        log.info("%s", text)
        handle.job.on_line(f"slurm: {text}")
