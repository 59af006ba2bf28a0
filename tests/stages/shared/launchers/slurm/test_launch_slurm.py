"""The SLURM launcher against commands scripted by the test; tests/service/test_slurm.py uses a real cluster."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from stages.shared.launchers import scheduled
from stages.shared.launchers import slurm as launch_slurm
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Job, JobFailed, check_launcher, make_launcher, run_job
from stages.shared.launchers.slurm import (
    END_FILE,
    SBATCH_FILE,
    SlurmHandle,
    SlurmLauncher,
    job_name,
    read_header,
    render_sbatch,
    seconds_of,
)
from tests.helpers.patience import at_most, wait_for

pytestmark = pytest.mark.promise(
    "On a real SLURM on one host, two nodes give the loss of one, and requeue, scancel and time limit change no number."
)

JOB_ID = 7
COMMANDS = {
    "sbatch": """
        env >"$FAKE/environment"; echo "$*" >>"$FAKE/calls"
        if [ -f "$FAKE/refusal" ]; then cat "$FAKE/refusal" >&2; exit 1; fi
        if [ -f "$FAKE/lost_answer" ]; then
          rm "$FAKE/lost_answer"; cp "$FAKE/queue" "$FAKE/living"
          echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1
        fi
        cp "$3" "$FAKE/submitted"; echo "${2#--job-name=}" >"$FAKE/name"; echo "7;cluster" """,
    "squeue": """
        if [ -f "$FAKE/down" ]; then
          echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
        fi
        case "$*" in
          *--steps*) echo 7.0 ;;
          *--me*) [ ! -f "$FAKE/living" ] || cat "$FAKE/living" ;;
          *) [ -f "$FAKE/queue" ] && cat "$FAKE/queue" ||
             { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; } ;;
        esac""",
    "scontrol": """
        case "$*" in
          "show hostnames"*) printf 'n1\\nn2\\n' ;;
          *) echo "scontrol $*" >>"$FAKE/calls"; kill "$PPID" ;;
        esac""",
    "scancel": """
        echo "scancel $*" >>"$FAKE/calls"
        if [ -f "$FAKE/cancelled" ]; then cp "$FAKE/cancelled" "$FAKE/queue"; fi
        case "$*" in *--batch*) ;; *) if [ -f "$FAKE/step" ]; then kill -TERM "$(cat "$FAKE/step")"; fi ;; esac""",
    "sacct": """
        if [ -f "$FAKE/accounting" ]; then cat "$FAKE/accounting"; exit 0; fi
        echo "Slurm accounting storage is disabled" >&2; exit 1""",
    "srun": """
        echo "$*" >"$FAKE/srun"; trap 'cp "$FAKE/result" result.json; exit 1' TERM
        echo "$$" >"$FAKE/step"; n=0
        while [ "$n" -lt "${SRUN_TENTHS:-300}" ]; do sleep 0.1; n=$((n + 1)); done
        exit "${SRUN_STATUS:-0}" """,
}


class Slurm:
    """The files that the fake commands read and write."""

    def __init__(self, directory: Path, run_dir: Path) -> None:
        self.directory, self.run_dir = directory, run_dir

    def say(self, state: str, elapsed: str = "0:00", reason: str = "None", file: str = "queue") -> None:
        name = self.directory / "name"  # of the job that was submitted last
        shown = name.read_text().strip() if name.exists() else job_name(_job(self.run_dir))
        line = f"{JOB_ID}|{state}|{shown}|{elapsed}|n[1-2]|{reason}|{self.run_dir}\n"
        (self.directory / file).write_text(line)

    def ended(self, state: str, status: int | None = None) -> None:
        """The job has ended in this state. If it could still do so, it has written its exit status."""
        self.say(state, "1:00")
        if status is not None:
            (self.run_dir / END_FILE).write_text(f"{JOB_ID} {status}\n")

    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []


def _job(run_dir: Path, **kwargs) -> Job:
    arguments = ("-m", "trainer", str(run_dir / "run.json"))
    return Job(str(run_dir), arguments, run_dir / "logs" / "trainer.log", **kwargs)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    directory = tmp_path / "scratch" / "train-0123456789abcdef"
    directory.mkdir(parents=True)
    (directory / "run.json").write_text("{}")
    return directory


@pytest.fixture
def slurm(tmp_path, run_dir, monkeypatch) -> Slurm:
    directory = tmp_path / "fake"
    directory.mkdir()
    for name, body in COMMANDS.items():
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(directory))
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setattr(launch_slurm, "VISIBLE_SECONDS", 0.3)
    monkeypatch.setattr(scheduled, "LOOK_SECONDS", 0.1)
    return Slurm(directory, run_dir)


HEADER = "#SBATCH --gpus-per-node=2\naddress=127.0.0.1\n"


@pytest.fixture
def cluster(tmp_path) -> Callable[..., ClusterConfig]:
    """Make a config whose job file has the given header."""

    def make(header: str = HEADER, **changes) -> ClusterConfig:
        (tmp_path / "gpu.sbatch").write_text(header)
        own = {"launcher": "slurm", "job_file": tmp_path / "gpu.sbatch", "nodes": 2, "processes": 4}
        return ClusterConfig(**{**own, **changes})

    return make


def _submitted(cluster: ClusterConfig, run_dir: Path) -> tuple[SlurmLauncher, SlurmHandle, list[str]]:
    """Return a launcher, its job, and the lines that are told about the job."""
    launcher, said = SlurmLauncher(cluster), []
    return launcher, launcher.submit(_job(run_dir, on_line=said.append)), said


def _poll_until(launcher: SlurmLauncher, handle: SlurmHandle, condition) -> None:
    deadline = time.monotonic() + at_most(20)
    while not condition():
        assert launcher.poll(handle) is None and time.monotonic() < deadline
        time.sleep(0.02)


EVERYTHING = """#!/bin/bash -l
#SBATCH -p gpu,gpu-long -A team-a -N 2  # two nodes
#SBATCH --time=2-00:30:00 --gres=nvme:1,gpu:h100:2
module load cuda/12.8
#SBATCH --signal B:USR1@600
#SBATCH --export=PATH,HOME,WANDB_MODE
container=(apptainer exec --nv --bind=/data "/images/a b.sif")
python=python
"""


@pytest.mark.parametrize("header", [HEADER, EVERYTHING])
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_the_script_is_sound_shell(cluster, run_dir, tmp_path, header):
    path = tmp_path / "job.sh"
    path.write_text(render_sbatch(cluster(header), _job(run_dir)))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_script_asks_for_what_the_header_and_the_recipe_say(cluster, run_dir):
    text = render_sbatch(cluster(EVERYTHING), _job(run_dir))
    options, _, commands = text.partition("\nset -u\n")
    asked = re.findall(r"^#SBATCH (.*)$", options, re.M)
    assert asked[:2] == ["-p gpu,gpu-long -A team-a -N 2  # two nodes", "--time=2-00:30:00 --gres=nvme:1,gpu:h100:2"]
    for option in (
        *("--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--signal=B:USR1@600"),
        *(f"--chdir={run_dir}", f"--output={run_dir}/logs/trainer.log", "--export=PATH,HOME,WANDB_MODE"),
    ):
        assert option in asked
    assert "--nnodes=2 --nproc-per-node=2" in text and "--max-restarts=0" in text
    assert "#SBATCH" not in commands  # sbatch reads none behind the first command
    assert commands.index("\npython=/") < commands.index("module load cuda/12.8\n") < commands.index("\nsrun ")
    assert "--signal=B:USR1@300\n" in render_sbatch(cluster(), _job(run_dir))


@pytest.mark.parametrize(
    "line",
    [
        *("--gpus-per-node=h100:2", "--gpus-per-node 4", "-G4", "-G 4", "--gpus=4", "--gres=gpu:2"),
        *("--gpus-per-task=2", "--gres=gpu:h100:2,nvme:1", "--gpus-per-node=0", "--gres=gres/gpu:2"),
        "--gpus-per-node=2 -n2 -N2",
    ],
)
def test_a_header_with_enough_gpus_passes(cluster, line):
    read_header(cluster(f"#SBATCH {line}\n"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-p gpu", "a node gets no GPUs, but execution.cluster.processes=4 on nodes=2 need 2; write #SBATCH --gpus"),
        ("-p gpu", "`#SBATCH --partition=NAME` and `#SBATCH --gpus-per-node=NUMBER`"),
        ("--gres=gpu", "a node gets 1 GPUs"),
        ("--gres=gpu:h100", "a node gets 1 GPUs"),
        ("--gpus=2", "a node gets 1 GPUs"),
        ("-N 4", "--nodes=4, but execution.cluster.nodes=2 with one task each need 2; change one"),
        ("--nodes=2-4", "--nodes=2-4, but"),
        ("--ntasks-per-node=8", "--ntasks-per-node=8, but"),
        ("-n 16", "--ntasks=16, but"),
        ("--signal=TERM@60", "--signal=TERM@60, but the job saves at USR1; write --signal=B:USR1@300"),
        ("--output=slurm-%j.out", "athanor itself decides what --output sets; remove that option"),
        ("-J mine", "what --job-name sets"),
        ("-a 1-9", "what --array sets"),
        ("--no-requeue", "what --no-requeue sets"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_work_starts(slurm, cluster, line, told):
    more = "" if "gpu" in line else " --gpus-per-node=2"
    with pytest.raises(InputError, match=rf"^/.*gpu\.sbatch: .*{re.escape(told)}") as caught:
        check_launcher(cluster(f"#SBATCH {line}{more}\n"))
    assert "\n" not in str(caught.value)


def test_a_header_that_is_not_there_is_told_with_the_least_one(slurm, cluster, tmp_path):
    least = "your sbatch header, at least the lines `#SBATCH --partition=NAME` and `#SBATCH --gpus-per-node=NUMBER`"
    with pytest.raises(ValueError, match=f"launcher=slurm needs job_file, the path of {least}"):
        cluster(job_file=None)
    with pytest.raises(InputError, match=rf"job_file=/.*/none cannot be read .*; give the path of {least}"):
        check_launcher(cluster(job_file=tmp_path / "none"))


def test_a_container_comes_between_srun_and_the_command(slurm, cluster, run_dir):
    header = "#SBATCH -G4\naddress=x\ncontainer=(apptainer exec 'a b.sif')\npython=python\n"
    assert _run_script(cluster(header), run_dir, None, SRUN_TENTHS="1", SLURM_CPUS_PER_TASK="16") == 0
    words = (slurm.directory / "srun").read_text()
    assert "--cpus-per-task=16 --cpu-bind=quiet,none apptainer exec a b.sif /bin/sh -c" in words
    assert "run.json python -m torch.distributed.run" in words and "--rdzv-endpoint=x:20007" in words


@pytest.mark.parametrize("name", ["a b", "a'b", "a%j", "a\nb", "a$HOME"])
def test_a_path_that_sbatch_would_read_otherwise_is_refused(cluster, tmp_path, name):
    with pytest.raises(InputError, match="use a --root of letters, digits"):
        render_sbatch(cluster(), _job(tmp_path / name / "train-0"))


def test_what_is_shown_is_submitted_and_kept_and_holds_secrets_by_name_alone(slurm, cluster, run_dir, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-value")
    monkeypatch.setenv("SBATCH_PARTITION", "somewhere-else")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    launcher, job = make_launcher(cluster()), _job(run_dir)
    text = launcher.plan(job)
    launcher.submit(job)
    assert (slurm.directory / "submitted").read_text() == (run_dir / SBATCH_FILE).read_text() == text
    (exported,) = re.findall(r"^#SBATCH --export=(.*)$", text, re.M)
    assert "AWS_SECRET_ACCESS_KEY" in exported.split(",") and "ALL" not in exported.split(",")
    assert not any("canary-value" in path.read_text() for path in run_dir.rglob("*") if path.is_file())
    seen = (slurm.directory / "environment").read_text().splitlines()
    assert "AWS_SECRET_ACCESS_KEY=canary-value" in seen and "SLURM_CONF=/etc/slurm.conf" in seen
    assert not any(line.startswith(("SBATCH_", "SLURM_JOB_ID")) for line in seen)


def test_states_are_told_once_and_the_end_is_the_jobs_own(slurm, cluster, run_dir):
    launcher, handle, said = _submitted(cluster(), run_dir)
    states = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    for state in states:
        slurm.say(state, reason="Priority" if state == "PENDING" else "None")
        _poll_until(launcher, handle, lambda state=state: f"is {state}" in said[-1])
        (run_dir / "logs" / "trainer.log").open("a").write(f"line in {state}\n")
    slurm.ended("COMPLETED", 0)
    while launcher.poll(handle) is None:
        time.sleep(0.02)
    assert launcher.poll(handle) == 0
    assert "slurm: job 7 is PENDING (Priority): it waits for its turn" in said
    assert "slurm: job 7 is RUNNING: it runs on n[1-2]" in said
    assert len(said) == len(set(said)) and "line in COMPLETING" in said
    assert handle.job.log_path.read_text().splitlines() == [f"line in {state}" for state in states]


@pytest.mark.parametrize(
    ("state", "own", "status", "words"),
    [
        ("FAILED", 3, 3, "exit status 3"),
        ("FAILED", None, 1, "exit status 1"),
        ("TIMEOUT", None, 1, "is TIMEOUT: it reached its time limit before it had saved; raise --time"),
        ("OUT_OF_MEMORY", 137, 137, "is OUT_OF_MEMORY: it ran out of memory; raise --mem in"),
        ("CANCELLED", None, 143, "is CANCELLED: it was cancelled (scancel)"),
        ("NODE_FAIL", None, 1, "is NODE_FAIL: it lost a node"),
        ("PREEMPTED", None, 1, "is PREEMPTED: it had to make room"),
    ],
)
def test_how_a_job_ends_badly(slurm, cluster, run_dir, monkeypatch, state, own, status, words):
    monkeypatch.setattr(launch_slurm, "RETURN_SECONDS", 0.3)
    slurm.ended(state, own)
    job = _job(run_dir, on_line=lambda line: None)
    job.log_path.parent.mkdir()
    launcher = SlurmLauncher(cluster())
    with pytest.raises(JobFailed) as caught:
        run_job(launcher, job, lambda: job.log_path.write_text("a line\n"))
    assert caught.value.exit_status == status and words in str(caught.value)


def test_a_failure_without_a_line_names_the_shared_file_system(slurm, cluster, run_dir):
    slurm.ended("FAILED")
    with pytest.raises(JobFailed, match="It must lie on a file system that all nodes share"):
        run_job(SlurmLauncher(cluster()), _job(run_dir))


def test_a_lost_node_is_no_end_while_the_job_may_be_queued_again(slurm, cluster, run_dir):
    launcher, handle, said = _submitted(cluster(), run_dir)
    slurm.ended("NODE_FAIL")
    until = time.monotonic() + 1  # longer than the wait for the files of an ended job
    _poll_until(launcher, handle, lambda: "NODE_FAIL" in said[-1] and time.monotonic() > until)
    slurm.say("PENDING", reason="BeginTime")
    _poll_until(launcher, handle, lambda: "PENDING (BeginTime)" in said[-1])
    assert handle.ended_at is None


def test_a_controller_that_is_away_ends_nothing(slurm, cluster, run_dir, monkeypatch):
    slurm.say("RUNNING")
    launcher, handle, said = _submitted(cluster(), run_dir)
    (slurm.directory / "down").touch()
    _poll_until(launcher, handle, lambda: "Unable to contact slurm controller" in said[-1])
    assert "the job goes on, asking again" in said[-1]
    (slurm.directory / "down").unlink()
    _poll_until(launcher, handle, lambda: "is RUNNING" in said[-1])
    monkeypatch.setattr(scheduled, "OUTAGE_SECONDS", 0.2)
    (slurm.directory / "down").touch()
    with pytest.raises(JobFailed, match="run again to go on waiting"):
        _poll_until(launcher, handle, lambda: False)


def test_a_job_that_the_cluster_has_forgotten_left_its_status_on_disk(slurm, cluster, run_dir):
    slurm.say("RUNNING")
    launcher, handle, _ = _submitted(cluster(), run_dir)
    (slurm.directory / "queue").unlink()
    (run_dir / END_FILE).write_text(f"{JOB_ID} 0\n")
    while (status := launcher.poll(handle)) is None:
        time.sleep(0.02)
    assert status == 0
    (run_dir / END_FILE).write_text("6 0\n")  # left by an earlier job
    with pytest.raises(JobFailed, match="is gone without an exit status"):
        run_job(launcher, _job(run_dir))
    (slurm.directory / "accounting").write_text("CANCELLED by 1000\n")
    with pytest.raises(JobFailed, match="is CANCELLED: it was cancelled"):
        run_job(launcher, _job(run_dir))


def test_a_living_job_that_was_asked_for_the_same_is_not_submitted_twice(slurm, cluster, run_dir):
    _submitted(cluster(), run_dir)
    slurm.say("RUNNING", "10:00")
    slurm.say("RUNNING", "10:00", file="living")
    _, handle, said = _submitted(cluster(), run_dir)
    assert handle.job_id == JOB_ID and handle.ran_seconds == 600
    assert said == ["slurm: job 7 is there already (RUNNING); waiting for it"]
    assert len([call for call in slurm.calls() if "--parsable" in call]) == 1


def test_a_job_whose_id_was_lost_on_the_way_is_not_submitted_twice(slurm, cluster, run_dir):
    _submitted(cluster(), run_dir)
    slurm.say("RUNNING")
    (slurm.directory / "lost_answer").touch()
    _, handle, said = _submitted(cluster(), run_dir)
    assert handle.job_id == JOB_ID and "Socket timed out" in said[0]
    assert said[1] == "slurm: job 7 is there already (RUNNING); waiting for it"


def test_a_living_job_that_was_asked_for_something_else_saves_and_ends_first(slurm, cluster, run_dir):
    _submitted(cluster(), run_dir)
    slurm.say("RUNNING")
    slurm.say("RUNNING", file="living")
    slurm.say("CANCELLED", "1:00", file="cancelled")
    (run_dir / "run.json").write_text('{"changed": 1}')
    _submitted(cluster(), run_dir)
    kinds = [shlex.split(call)[0] for call in slurm.calls()]
    assert kinds == ["--parsable", "scancel", "--parsable"]
    assert "--batch --signal=TERM 7" in slurm.calls()[1]


def test_the_deadline_counts_the_time_that_it_runs(slurm, cluster, run_dir):
    slurm.say("PENDING")
    slurm.say("CANCELLED", "1:00", file="cancelled")
    launcher, handle, _ = _submitted(cluster(timeout_seconds=0.4), run_dir)
    until = time.monotonic() + 1
    _poll_until(launcher, handle, lambda: time.monotonic() > until)
    slurm.say("RUNNING")
    with pytest.raises(JobFailed, match=r"timeout_seconds=0\.4") as caught:
        _poll_until(launcher, handle, lambda: False)
    assert caught.value.exit_status == 124 and "--batch --signal=TERM" in slurm.calls()[-1]


def test_who_does_not_end_after_its_grace_is_cancelled_by_force(slurm, cluster, run_dir):
    launcher, handle, _ = _submitted(cluster(stop_grace_seconds=0.3), run_dir)
    slurm.say("PENDING")
    launcher.poll(handle)
    slurm.say("CANCELLED", "0:00", file="cancelled")
    launcher.cancel(handle)
    assert slurm.calls()[-1] == "scancel --quiet 7"
    launcher.cancel(handle)  # an ended job is not cancelled
    assert sum("scancel" in call for call in slurm.calls()) == 1


def test_without_slurm_the_way_out_is_named_before_work_starts(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needs sbatch, squeue, scancel, scontrol on PATH: run it on a login node"):
        check_launcher(cluster())
    assert "#SBATCH" in make_launcher(cluster()).plan(_job(tmp_path / "train-0"))


def test_what_sbatch_refuses_is_the_users_to_mend(slurm, cluster, run_dir):
    (slurm.directory / "refusal").write_text("sbatch: error: Batch job submission failed: Invalid partition name\n")
    line = r"Batch job submission failed: Invalid partition name; see execution\.cluster"
    with pytest.raises(InputError, match=line):
        _submitted(cluster(), run_dir)


@pytest.mark.parametrize(("text", "seconds"), [("0:05", 5), ("1:00:00", 3600), ("2-03:04:05", 183845), ("INVALID", 0)])
def test_times_of_the_queue(text, seconds):
    assert seconds_of(text) == seconds


def _run_script(
    cluster: ClusterConfig, run_dir: Path, tell: int | None, result: str = "stopped", **variables: str
) -> int:
    """Run the rendered file by hand, with an srun that gets a signal or ends by itself."""
    path = run_dir / SBATCH_FILE
    path.write_text(render_sbatch(cluster, _job(run_dir)))
    (run_dir / "result.json").write_text('{"status": "stopped"}')  # left by an earlier try
    fake = Path(os.environ["FAKE"])
    (fake / "result").write_text(f'{{\n "status": "{result}"\n}}\n')
    own = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", **variables}
    process = subprocess.Popen(["bash", str(path)], cwd=run_dir, env={**os.environ, **own}, start_new_session=True)
    try:
        if tell is not None:
            wait_for((fake / "step").exists, 20, "step of the job")
            process.send_signal(tell)
        return process.wait(at_most(20))
    finally:
        process.poll() is None and os.killpg(process.pid, signal.SIGKILL)


SAVES = "scancel --quiet --signal=TERM 7"


def test_the_signal_before_the_time_limit_saves_and_queues_again(slurm, cluster, run_dir):
    assert _run_script(cluster(), run_dir, signal.SIGUSR1) != 0  # the requeue itself ends it
    assert slurm.calls() == [SAVES, "scontrol requeue 7"] and not (run_dir / END_FILE).exists()


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, cluster, run_dir):
    assert _run_script(cluster(), run_dir, signal.SIGTERM) == 75
    assert slurm.calls() == [SAVES] and (run_dir / END_FILE).read_text() == "7 75\n"


def test_a_job_that_did_not_save_is_not_queued_again(slurm, cluster, run_dir):
    assert _run_script(cluster(), run_dir, signal.SIGUSR1, result="failed") == 1
    assert slurm.calls() == [SAVES]


@pytest.mark.parametrize("status", ["0", "2"])
def test_a_job_that_ends_by_itself_hands_on_its_status(slurm, cluster, run_dir, status):
    assert _run_script(cluster(), run_dir, None, SRUN_STATUS=status, SRUN_TENTHS="1") == int(status)
    assert (run_dir / END_FILE).read_text() == f"7 {status}\n" and not (run_dir / "result.json").exists()
    assert "--rdzv-endpoint=127.0.0.1:20007" in (slurm.directory / "srun").read_text()


def test_a_node_that_does_not_see_the_root_says_so(cluster, run_dir, capfd):
    text = render_sbatch(cluster(), _job(run_dir))
    (on_node,) = re.findall(r"^readonly on_node='\n(.*?)'$", text, re.M | re.S)
    done = subprocess.run(["/bin/sh", "-c", on_node, "athanor", "/no/run.json", "true"], capture_output=True)
    assert done.returncode == 2 and b"does not see /no/run.json; the root must lie on" in done.stderr
    run_json = str(run_dir / "run.json")
    assert subprocess.run(["/bin/sh", "-c", on_node, "athanor", run_json, "true"]).returncode == 0
