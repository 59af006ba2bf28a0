"""SLURM: an sbatch file is rendered, kept beside run.json and submitted; the queue is asked how the job is.

The flow and the nodes see the root at the same path, so metrics, result and logs go through it. What a killed flow
left in the queue is found again by name and directory, and the next try waits for it instead of submitting a second.
What the launcher itself has to say goes to `on_line` and not into the log, which the nodes write.
"""

import hashlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_json, write_text
from stages import slurm_client as slurm
from stages.cluster_config import ClusterConfig
from stages.launch import EXIT_DEADLINE, NOTHING_NEW, Handle, Job, JobFailed, new_lines
from stages.rank_logs import remove_rank_logs
from stages.slurm_client import JobState, SlurmAway
from stages.slurm_script import END_FILE, SBATCH_FILE, job_name, render_sbatch, run_dir_of
from trainer.contract import EXIT_STOPPED

SLURM_JSON = "slurm.json"
OUTAGE_SECONDS = 3600.0
SUBMIT_SECONDS = 120.0  # to wait for a slurmctld that does not answer, before there is a job
CANCEL_SECONDS = 90.0  # for Slurm's own SIGTERM and SIGKILL, after the time to save
RETURN_SECONDS = 30.0  # a job that lost its node may be queued again
VISIBLE_SECONDS = 30.0  # for a file system to show here what a node has written
log = logging.getLogger("athanor.slurm")


@dataclass(slots=True, kw_only=True)
class SlurmHandle(Handle):
    """A job of the queue. `ran_seconds` is what it has run in all tries, as far as this launcher saw."""

    job_id: int
    reader: Iterator[str]
    status: int | None = None
    ran_seconds: float = 0.0
    looked: float = field(default_factory=time.monotonic)
    next_look: float = 0.0
    answered: float = field(default_factory=time.monotonic)
    ended: float | None = None
    was_running: bool = False
    said: str = ""


class SlurmLauncher:
    """sbatch -> srun -> torchrun, which restarts nothing: Slurm queues the job again, the trainer resumes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    def check(self) -> None:
        """See that Slurm is here.

        Raises:
            InputError: it is not.
        """
        slurm.check_installed()

    def plan(self, job: Job) -> str:
        """The sbatch file that `submit` would submit."""
        return render_sbatch(self.cluster, job)

    def submit(self, job: Job) -> SlurmHandle:
        """Submit the job, or go on with a living one that was asked for the same.

        Raises:
            InputError: there is no Slurm here, or it refuses the job.
        """
        self.check()
        run_dir, script = run_dir_of(job), self.plan(job)
        digest = _digest(script, job)
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        living = _patiently(lambda: slurm.find_living(job_name(job), run_dir))
        if living is not None:
            handle = self._handle(job, living.job_id)
            if _asked_before(run_dir) == digest:
                handle.ran_seconds = living.seconds
                _say(handle, f"job {living.job_id} is there already ({living.state}); waiting for it")
                return handle
            _say(handle, f"job {living.job_id} was asked for something else; it is told to save and end")
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
        """None while it waits or runs; hands new lines of the log to `on_line`.

        Raises:
            JobFailed: it has run for longer than the deadline (it is cancelled before), or nothing has been heard of
                it for an hour.
        """
        _read_log(handle)
        if handle.status is not None or time.monotonic() < handle.next_look:
            return handle.status
        handle.next_look = time.monotonic() + self.cluster.slurm.poll_seconds
        try:
            self._look(handle)
            handle.answered = time.monotonic()
        except SlurmAway as error:
            self._bear(handle, error)
        if handle.status is None and handle.ran_seconds > self.cluster.timeout_seconds:
            self.cancel(handle)
            raise JobFailed(f"stopped after timeout_seconds={self.cluster.timeout_seconds:g}", handle, EXIT_DEADLINE)
        _read_log(handle)
        return handle.status

    def cancel(self, handle: SlurmHandle) -> None:
        """Let the ranks save, then end what is left and wait for that. Does nothing to an ended job."""
        kill_at = time.monotonic() + self.cluster.stop_grace_seconds
        is_told = is_killed = False
        while handle.status is None and time.monotonic() < kill_at + CANCEL_SECONDS:
            try:
                found = slurm.find_job(handle.job_id)
                if found is None or found.state in slurm.ENDED:
                    self._end(handle, found, time.monotonic() - VISIBLE_SECONDS)
                elif found.state not in slurm.RUNS or time.monotonic() > kill_at:
                    is_killed or slurm.cancel(handle.job_id)
                    is_killed = found.state in slurm.RUNS  # one that is queued again in between is cancelled again
                elif not is_told:
                    slurm.let_save(handle.job_id)
                    is_told = True
            except SlurmAway as error:
                _say(handle, f"{error}; trying again to cancel job {handle.job_id}")
            _read_log(handle)
            if handle.status is None:
                time.sleep(min(0.5, self.cluster.slurm.poll_seconds))
        if handle.status is None:
            log.error("SLURM job %d was not seen to end; end it with: scancel %d", handle.job_id, handle.job_id)

    def logs(self, handle: SlurmHandle) -> list[str]:
        """The whole log so far, line by line."""
        return handle.job.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def _handle(self, job: Job, job_id: int) -> SlurmHandle:
        command = ["sbatch", str(run_dir_of(job) / SBATCH_FILE)]
        job.log_path.touch()
        return SlurmHandle(job=job, command=command, job_id=job_id, reader=new_lines(job.log_path))

    def _look(self, handle: SlurmHandle) -> None:
        found, now = slurm.find_job(handle.job_id), time.monotonic()
        if handle.was_running:
            handle.ran_seconds += now - handle.looked
        handle.was_running, handle.looked = found is not None and found.state == "RUNNING", now
        if found is not None:
            _tell(handle, found)
        if found is not None and found.state not in slurm.ENDED:
            handle.ended = None
            return
        handle.ended = handle.ended or now
        is_back_soon = found is not None and found.state in slurm.MAY_RETURN and now - handle.ended < RETURN_SECONDS
        if not is_back_soon:
            self._end(handle, found, handle.ended)
        handle.next_look = min(handle.next_look, now + 0.5)

    def _end(self, handle: SlurmHandle, found: JobState | None, ended: float) -> None:
        """Note how it ended, once the files of its nodes are here.

        The job's last act is to write its exit status: when that file is seen, whatever it wrote before is too.
        """
        own = _end_status(handle)
        has_run = found is None or found.seconds > 0
        wait = VISIBLE_SECONDS if found is not None and found.state == "COMPLETED" else VISIBLE_SECONDS / 6
        if own is None and has_run and time.monotonic() - ended < wait:
            return
        state, status = slurm.ended_as(handle.job_id) or (found.state if found else "", own)
        if status is None:
            status = 1
            handle.why = f"SLURM job {handle.job_id} is gone and left no word; see its log, or sacct -j {handle.job_id}"
        elif state not in ("COMPLETED", "FAILED", ""):
            status = status or (143 if state == "CANCELLED" else 1)
            handle.why = f"SLURM job {handle.job_id} is {state}: it {slurm.WORDS.get(state, 'did not finish')}"
        elif state == "FAILED" and own is None and not handle.lines:
            handle.why = (
                f"SLURM job {handle.job_id} failed before it could write {handle.job.log_path}; "
                "does the first node see the root? It must lie on a file system that all nodes share"
            )
        handle.status = EXIT_STOPPED if own == EXIT_STOPPED else status

    def _bear(self, handle: SlurmHandle, error: SlurmAway) -> None:
        """A queue that does not answer is no end of the job, for a while."""
        _say(handle, f"{error}; the job goes on, asking again")
        silent = time.monotonic() - handle.answered
        if silent > OUTAGE_SECONDS:
            what = f"no answer about SLURM job {handle.job_id} for {silent:.0f} s; run again to go on waiting for it"
            raise JobFailed(what, handle, 1) from error


def _patiently(ask):
    """Ask a slurmctld that may be starting anew; what it refuses for good is the user's to mend."""
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
    """Submit a file; returns the job's id."""
    command = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmAway(f"sbatch: {error}") from error
    if done.returncode == 0:
        return int(done.stdout.strip().partition(";")[0])
    reason = slurm.last_line(done.stderr)
    if re.search(r"contact slurm controller|timed out|temporarily|try again|Socket", reason, re.IGNORECASE):
        raise SlurmAway(f"sbatch: {reason}")
    raise InputError(f"sbatch refuses {script}: {reason}; see execution.cluster.slurm and `sinfo`")


def _environment() -> Mapping[str, str]:
    """What sbatch sees: no options but the file's, and nothing of a job that the flow itself may run in."""
    own = re.compile(r"SBATCH_|SLURM_(?!CONF$)")
    return {name: value for name, value in os.environ.items() if not own.match(name)}


def _digest(script: str, job: Job) -> str:
    """Of what a job is asked: the file and run.json."""
    run_json = Path(job.arguments[-1])
    content = run_json.read_bytes() if run_json.is_file() else b""
    return hashlib.sha256(script.encode() + b"\0" + content).hexdigest()[:16]


def _asked_before(run_dir: Path) -> str | None:
    path = run_dir / SLURM_JSON
    found = re.search(r'"asked": "(\w+)"', path.read_text(encoding="utf-8")) if path.is_file() else None
    return found[1] if found else None


def _end_status(handle: SlurmHandle) -> int | None:
    """What the job wrote last; None while that is not seen, or of another job."""
    run_dir = run_dir_of(handle.job)
    if END_FILE not in os.listdir(run_dir):  # a listing is asked of the server, where a lookup may be remembered
        return None
    found = re.fullmatch(r"(\d+) (\d+)\s*", (run_dir / END_FILE).read_text())
    return int(found[2]) if found and int(found[1]) == handle.job_id else None


def _read_log(handle: SlurmHandle) -> None:
    for line in handle.reader:
        if line == NOTHING_NEW:
            return
        handle.lines.append(line)
        handle.job.on_line(line)


def _tell(handle: SlurmHandle, found: JobState) -> None:
    words = slurm.WORDS.get(found.state, "").format(id=found.job_id)
    reason = f" ({found.reason})" if found.reason not in ("None", "") else ""
    nodes = f" on {found.nodes}" if found.nodes and found.state == "RUNNING" else ""
    _say(handle, f"job {found.job_id} is {found.state}{reason}: it {words or 'goes on'}{nodes}")


def _say(handle: SlurmHandle, text: str) -> None:
    """A line of the launcher's own, each time that it is another."""
    if text != handle.said:
        handle.said = text
        log.info("%s", text)
        handle.job.on_line(f"slurm: {text}")
