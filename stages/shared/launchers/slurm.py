"""The launcher for SLURM: renders an sbatch file, stores it next to run.json and submits it. For Slurm 20.11 and newer.

The queue gives the job's state. Its name ends with a digest of its content, so the next try of the same work can tell
whether a living job in its directory is the same. Only Slurm restarts a job, and the trainer resumes.

The sbatch file is sbatch.sh.j2 with the values of the config, and the user's header, execution.cluster.job_file:
`#SBATCH` lines, and lines of bash.

    #SBATCH --partition=gpu --account=research --time=2-00:00:00
    #SBATCH --gpus-per-node=8
    module load cuda/12.8                              # runs on the first node, before srun
    container=(apptainer exec --nv /images/train.sif)  # words between srun and the command
    python=python                                      # interpreter on the nodes; otherwise the flow's
    address=10.0.0.1                                   # where the ranks meet; otherwise the first node's name

Only the options that athanor depends on are checked. sbatch checks the others. The paths that stand in `#SBATCH` lines
are checked, and everything else is quoted for the shell. The file contains only the names of environment variables:
sbatch takes their values from the flow's environment when the file is submitted.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from dataset_builders.errors import InputError
from dataset_builders.storage.files import GrowingFile, write_text
from stages.shared.launchers.config import JOB_FILES, ClusterConfig
from stages.shared.launchers.job import ON_RANK, Job, rank_environment, read_job_file
from stages.shared.launchers.scheduled import ClusterError, ScheduledHandle, ScheduledLauncher
from trainer.contract.names import EXIT_STOPPED, RESULT_JSON

SBATCH_FILE = "job.sbatch"
END_FILE = "slurm-end"  # "<job id> <exit status>", written by the job at its end
SIGNAL = "B:USR1@300"  # 300 seconds before the time limit, the batch script lets the ranks save
CALL_SECONDS = 60.0
RETURN_SECONDS = 30.0  # time in which a job that lost its node may be queued again
VISIBLE_SECONDS = 30.0  # time for a shared file system to show a node's files here
_TEMPLATE = Path(__file__).parent / "sbatch.sh.j2"
_NEEDED = ("sbatch", "squeue", "scancel", "scontrol")
_MAY_RETURN = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
_ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "REVOKED"),
    *_MAY_RETURN,
}
_RUNS = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
_WORDS = {
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
_VARIABLES = (  # that the job gets from the flow, unless the header has an --export of its own
    *("PATH", "HOME", "USER", "LANG"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    *("ATHANOR_CACHE_DIR", "ATHANOR_CACHE_GB", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)
_PATH = re.compile(r"[A-Za-z0-9_.,:@+=/~-]+")
# The job is found and followed by what athanor writes for these options.
_OWN = {"array", "chdir", "error", "input", "job-name", "no-requeue", "open-mode", "output", "wait"}
_LONG = {
    **{"a": "array", "D": "chdir", "e": "error", "G": "gpus", "i": "input", "J": "job-name"},
    **{"N": "nodes", "n": "ntasks", "o": "output", "W": "wait"},
}


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as the queue shows it.

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


@dataclass(slots=True, kw_only=True)
class SlurmHandle(ScheduledHandle):
    """A job in the queue.

    Attributes:
        name: the name that squeue shows, which ends with the digest of the job's content.
        script: the text of the sbatch file.
        last_look: time of the last look at the queue; `was_running` then.
        ended_at: time when the queue first showed the job as ended.
    """

    name: str
    script: str
    job_id: int = 0
    last_look: float = field(default_factory=time.monotonic)
    was_running: bool = False
    ended_at: float | None = None


class SlurmLauncher(ScheduledLauncher):
    """The launcher of SLURM jobs: sbatch -> srun -> torchrun."""

    unreachable = "Slurm does not answer ({error}); see sinfo, then run the same command again"

    def check(self) -> None:
        """Check that Slurm is installed and that the header fits the run.

        Raises:
            InputError: a command of Slurm is missing, or a line of the header is wrong.
        """
        missing = [name for name in _NEEDED if shutil.which(name) is None]
        if missing:
            raise InputError(
                f"execution.cluster.launcher=slurm needs {', '.join(missing)} on PATH: run it on a login node of the "
                "cluster, or take --set execution.cluster.launcher=torchrun for this machine"
            )
        read_header(self.cluster)

    def plan(self, job: Job) -> str:
        """Return the sbatch file that `submit` would submit."""
        return render_sbatch(self.cluster, job)

    def _prepare(self, job: Job) -> SlurmHandle:
        self.check()
        script = self.plan(job)
        content = script.encode() + b"\0" + (job.run_json.read_bytes() if job.run_json.is_file() else b"")
        return SlurmHandle(
            job=job,
            command=["sbatch", str(job.run_json.parent / SBATCH_FILE)],
            log=GrowingFile(job.log_path),
            name=f"{job_name(job)}-{hashlib.sha256(content).hexdigest()[:16]}",
            script=script,
        )

    def _attach_or_make(self, handle: SlurmHandle) -> None:
        run_dir, own = handle.job.run_json.parent, job_name(handle.job)
        found = (job for job in _queue("--me") if job.run_dir == run_dir and job.name.startswith(own))
        if (living := next(found, None)) is not None:
            _set_id(handle, living.job_id)
            if living.name == handle.name:
                handle.ran_seconds = living.seconds
                self._say(handle, f"job {living.job_id} is there already ({living.state}); waiting for it")
                return
            self._say(handle, f"job {living.job_id} has other settings; it will save and end")
            self.cancel(handle)
        self._clear(handle)
        handle.ended_at = None
        write_text(run_dir / SBATCH_FILE, handle.script)
        _set_id(handle, _sbatch(run_dir / SBATCH_FILE, handle.name))
        self._say(handle, f"job {handle.job_id} submitted")

    def _look(self, handle: SlurmHandle) -> None:
        job, now = _find(handle.job_id), time.monotonic()
        if handle.was_running:  # the times of all tries are added up
            handle.ran_seconds += now - handle.last_look
        handle.was_running, handle.last_look = job is not None and job.state == "RUNNING", now
        if job is not None:
            words = _WORDS.get(job.state, "").format(id=job.job_id)
            reason = f" ({job.reason})" if job.reason not in ("None", "") else ""
            nodes = f" on {job.nodes}" if job.nodes and job.state == "RUNNING" else ""
            self._say(handle, f"job {job.job_id} is {job.state}{reason}: it {words or 'goes on'}{nodes}")
        if job is not None and job.state not in _ENDED:
            handle.ended_at = None
            return
        handle.ended_at = handle.ended_at or now
        may_return = job is not None and job.state in _MAY_RETURN and now - handle.ended_at < RETURN_SECONDS
        if not may_return:
            self._settle(handle, job, handle.ended_at)
        handle.next_look = min(handle.next_look, now + 0.5)

    def _end(self, handle: SlurmHandle, is_late: bool) -> None:
        job = _find(handle.job_id)
        if job is None or job.state in _ENDED:
            self._settle(handle, job, time.monotonic() - VISIBLE_SECONDS)
        elif job.state not in _RUNS or is_late:
            if not handle.is_killed:  # SIGTERM to the whole job, and SIGKILL after the cluster's KillWait
                _call("scancel", "--quiet", str(handle.job_id), unknown="")
            handle.is_killed = job.state in _RUNS  # a job that is requeued meanwhile is cancelled again
        elif not handle.is_told:  # SIGTERM to the batch script, which passes it to the ranks and waits for them
            _call("scancel", "--quiet", "--batch", "--signal=TERM", str(handle.job_id), unknown="")
            handle.is_told = True

    def _settle(self, handle: SlurmHandle, job: QueuedJob | None, ended_at: float) -> None:
        """Set the exit status, after the files of the job's nodes are visible here.

        The job writes its exit status last: when that file is visible, all earlier files are visible too.
        """
        own = _end_status(handle)
        has_run = job is None or job.seconds > 0
        wait = VISIBLE_SECONDS if job is not None and job.state == "COMPLETED" else VISIBLE_SECONDS / 6
        if own is None and has_run and time.monotonic() - ended_at < wait:
            return
        state = job.state if job is not None else _recorded_state(handle.job_id)
        status = own
        if state not in ("COMPLETED", "FAILED", ""):
            status = status or (143 if state == "CANCELLED" else 1)
            handle.why = f"{handle.title} is {state}: it {_WORDS.get(state, 'did not finish')}"
        elif status is None and state == "":
            status = 1
            handle.why = f"{handle.title} is gone without an exit status; see its log, or sacct -j {handle.job_id}"
        elif status is None:
            status = 0 if state == "COMPLETED" else 1
            if status and not handle.lines:
                handle.why = (
                    f"{handle.title} failed before it could write {handle.job.log_path}; "
                    "does the first node see the root? It must lie on a file system that all nodes share"
                )
        handle.status = EXIT_STOPPED if own == EXIT_STOPPED else status


def _set_id(handle: SlurmHandle, job_id: int) -> None:
    handle.job_id, handle.title, handle.by_hand = job_id, f"SLURM job {job_id}", f"scancel {job_id}"


def _sbatch(script: Path, name: str) -> int:
    """Submit this file, and return the job's id."""
    # Without options in variables, and without variables of a job that runs the flow.
    own = re.compile(r"SBATCH_|SLURM_(?!CONF$)")
    environment = {key: value for key, value in os.environ.items() if not own.match(key)}
    done = _run("sbatch", "--parsable", f"--job-name={name}", str(script), environment=environment)
    if done.returncode == 0:
        return int(done.stdout.strip().partition(";")[0])
    reason = _last_line(done.stderr)
    if re.search(r"contact slurm controller|timed out|temporarily|try again|Socket", reason, re.IGNORECASE):
        raise ClusterError(f"sbatch: {reason}")
    raise InputError(f"sbatch refuses {script}: {reason}; see execution.cluster.job_file and `sinfo`")


def _find(job_id: int) -> QueuedJob | None:
    """Return the job as the queue shows it, also for a while after its end; None if the queue does not know it."""
    return next(iter(_queue("--states=all", f"--jobs={job_id}")), None)


def _queue(*options: str) -> list[QueuedJob]:
    # The working directory is last, because only it may contain the separator.
    shown = _call("squeue", "--noheader", "--format=%A|%T|%j|%M|%N|%r|%Z", *options, unknown="")
    rows = [line.split("|", 6) for line in shown.splitlines() if line.count("|") >= 6]
    return [
        QueuedJob(int(job_id), state, name, Path(run_dir), seconds_of(elapsed), nodes, reason)
        for job_id, state, name, elapsed, nodes, reason, run_dir in rows
    ]


def seconds_of(text: str) -> float:
    """Convert squeue's time (2-03:04:05 or 4:05) to seconds; 0 for any other text."""
    time = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if time is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in time.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


def _recorded_state(job_id: int) -> str:
    """Return the last state of a job that the queue has forgotten; "" if the cluster keeps no accounting."""
    if shutil.which("sacct") is None:
        return ""
    try:
        shown = _call("sacct", "-X", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=State")
    except ClusterError:
        return ""
    return shown.split()[0] if shown.split() else ""  # "CANCELLED by 1000"


def _end_status(handle: SlurmHandle) -> int | None:
    """Return the exit status that the job wrote; None while the file is not visible, or if another job wrote it."""
    run_dir = handle.job.run_json.parent
    if END_FILE not in os.listdir(run_dir):  # a listing comes from the server; a lookup may be cached
        return None
    match = re.fullmatch(r"(\d+) (\d+)\s*", (run_dir / END_FILE).read_text())
    return int(match[2]) if match and int(match[1]) == handle.job_id else None


def _call(*command: str, unknown: str | None = None) -> str:
    """Return the command's standard output; `unknown`, if given, for a job that Slurm does not know."""
    done = _run(*command)
    if done.returncode == 0:
        return done.stdout
    if unknown is not None and "invalid job id" in done.stderr.lower():
        return unknown
    raise ClusterError(f"{command[0]}: {_last_line(done.stderr)}")


def _run(*command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": CALL_SECONDS}
    try:
        return subprocess.run(command, env=environment, check=False, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{command[0]}: {error}") from error


def _last_line(text: str) -> str:
    """Return the last line that a failed command printed, without the command's name."""
    lines = text.strip().splitlines() or ["no word"]
    return re.sub(r"^\w+: (error: )?", "", lines[-1])


def job_name(job: Job) -> str:
    """Return the name that squeue shows: athanor-train-<fingerprint>."""
    name = next((part for part in reversed(Path(job.name).parts) if "-" in part), Path(job.name).name)
    return "athanor-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:60]


def render_sbatch(cluster: ClusterConfig, job: Job) -> str:
    """Return the whole file, ready to be submitted.

    Raises:
        InputError: the header cannot be used, or a path of the run has a character that an #SBATCH line cannot contain.
    """
    header, commands, asked = read_header(cluster)
    run_dir = job.run_json.parent
    for path in (run_dir, job.log_path):
        if not _PATH.fullmatch(str(path)):
            raise InputError(
                f"{path} cannot stand in an sbatch file: use a --root of letters, digits and any of _ . , : @ + = / ~ -"
            )
    options = {
        "job-name": job_name(job),
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "chdir": run_dir,
        "output": job.log_path,
        "open-mode": "append",
        "signal": asked["signal"],
        "export": asked.get("export", ",".join(_VARIABLES)),
    }
    threads = {"OMP_NUM_THREADS": str(cluster.num_threads)} if cluster.num_threads else {}
    values = {
        "script": run_dir / SBATCH_FILE,
        "header": header,
        "commands": commands,
        "options": options,
        "run_dir": run_dir,
        "run_json": job.run_json,
        "result_json": RESULT_JSON,
        "end_file": END_FILE,
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **rank_environment(cluster, job.name), **threads},
        "num_threads": cluster.num_threads,
        "on_rank": ON_RANK,
        "python": sys.executable,
        "nodes": cluster.nodes,
        "per_node": cluster.per_node,
        "arguments": shlex.join(job.arguments),
    }
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)


def read_header(cluster: ClusterConfig) -> tuple[list[str], str, dict[str, str]]:
    """Return the header's `#SBATCH` lines, its bash as one text, and the value of each option by its long name.

    Raises:
        InputError: the file cannot be read, or an option is missing or contradicts the run.
    """
    file, nodes, need = cluster.job_file, cluster.nodes, cluster.per_node
    lines = read_job_file(cluster).splitlines()
    sbatch = [line for line in lines if line.startswith("#SBATCH")]
    asked = {"signal": SIGNAL, **_options(sbatch)}
    for name in sorted(_OWN & asked.keys()):
        raise InputError(f"{file}: athanor itself decides what --{name} sets; remove that option")
    for name, number in {"nodes": nodes, "ntasks": nodes, "ntasks-per-node": 1}.items():
        if asked.get(name, str(number)) != str(number):
            raise InputError(
                f"{file}: --{name}={asked[name]}, but execution.cluster.nodes={nodes} with one task each need {number}"
                "; change one of them, or remove the option"
            )
    if (gpus := _gpus(asked, nodes)) is None or 0 < gpus < need:
        raise InputError(
            f"{file}: a node gets {gpus or 'no'} GPUs, but execution.cluster.processes={cluster.processes} on nodes="
            f"{nodes} need {need}; write #SBATCH --gpus-per-node={need}, or 0 on CPU and where all GPUs of a node come "
            f"by themselves. The file is {JOB_FILES['slurm']}"
        )
    if not re.fullmatch(r"B:USR1@\d+", asked["signal"]):
        raise InputError(f"{file}: --signal={asked['signal']}, but the job saves at USR1; write --signal={SIGNAL}")
    return sbatch, "\n".join(line for line in lines if not line.startswith(("#SBATCH", "#!"))).strip("\n"), asked


def _options(lines: list[str]) -> dict[str, str]:
    options, name = {}, ""
    for word in (word for line in lines for word in line.partition(" #")[0].split()[1:]):
        value = word
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word.startswith("-"):
            name, value = _LONG.get(word[1:2], word[1:2]), word[2:]
        options[name] = value.strip("'\"")
    return options


def _gpus(asked: dict[str, str], nodes: int) -> int | None:
    """Return the number of GPUs per node that the header asks for; None if no option asks for any."""
    for name, share in {"gpus-per-node": 1, "gpus-per-task": 1, "gres": 1, "gpus": nodes}.items():
        entries = [entry for entry in asked.get(name, "").split(",") if name != "gres" or "gpu" in entry.split(":")[0]]
        if any(entries):  # type:number, type or number
            return sum(int(end) if (end := entry.rpartition(":")[2]).isdigit() else 1 for entry in entries) // share
    return None
