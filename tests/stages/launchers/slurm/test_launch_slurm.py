"""The SLURM launcher against commands scripted by the test; tests/service/test_slurm.py uses a real cluster."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from dataset_builders.errors import InputError
from stages.launchers.config import ClusterConfig, SlurmConfig
from stages.launchers.job import Job, JobFailed, check_launcher, make_launcher, run_job
from stages.launchers.slurm import launcher as launch_slurm
from stages.launchers.slurm.client import seconds_of
from stages.launchers.slurm.launcher import SlurmLauncher
from stages.launchers.slurm.script import END_FILE, SBATCH_FILE, job_name, render_sbatch

JOB_ID = 7
COMMANDS = {
    "sbatch": """
        env >"$FAKE/environment"; echo "$*" >>"$FAKE/calls"
        if [ -f "$FAKE/refusal" ]; then cat "$FAKE/refusal" >&2; exit 1; fi
        cp "$2" "$FAKE/submitted"; echo "7;cluster" """,
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
          show*) [ -f "$FAKE/shown" ] && cat "$FAKE/shown" || { echo "Invalid job id specified" >&2; exit 1; } ;;
          *) echo "scontrol $*" >>"$FAKE/calls"; kill "$PPID" ;;
        esac""",
    "scancel": """
        echo "scancel $*" >>"$FAKE/calls"
        if [ -f "$FAKE/cancelled" ]; then cp "$FAKE/cancelled" "$FAKE/queue"; fi
        case "$*" in *--batch*) ;; *) if [ -f "$FAKE/step" ]; then kill -TERM "$(cat "$FAKE/step")"; fi ;; esac""",
    "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1',
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
        name = job_name(_job(self.run_dir))
        line = f"{JOB_ID}|{state}|{name}|{elapsed}|n[1-2]|{reason}|{self.run_dir}\n"
        (self.directory / file).write_text(line)

    def ended(self, state: str, code: str, file: str | None = None) -> None:
        self.say(state, "1:00")
        (self.directory / "shown").write_text(f"JobId={JOB_ID} JobState={state} Restarts=0 ExitCode={code} Command=x\n")
        if file is not None:
            (self.run_dir / END_FILE).write_text(f"{JOB_ID} {file}\n")

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
    return Slurm(directory, run_dir)


def _cluster(**changes) -> ClusterConfig:
    slurm = SlurmConfig(**{"poll_seconds": 0.1, "rendezvous_address": "127.0.0.1", **changes.pop("slurm", {})})
    return ClusterConfig(**{"launcher": "slurm", "nodes": 2, "processes": 4, "slurm": slurm, **changes})


def _poll_until(launcher: SlurmLauncher, handle, condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert launcher.poll(handle) is None and time.monotonic() < deadline
        time.sleep(0.02)


EVERYTHING = {
    "partition": "gpu,gpu-long",
    "account": "team-a",
    "qos": "high",
    "constraint": "h100&ib|[a*2]",
    "reservation": "r_1",
    "nodelist": "n[1-2]",
    "exclude": "n9",
    "time_limit": "2-00:30:00",
    "gpu_type": "h100",
    "cpus_per_task": 16,
    "memory": "900G",
    "exclusive": True,
    "extra": ("--switches=1@00:10:00", "--hint=nomultithread"),
    "setup": ("module load cuda/12.8", "ulimit -l unlimited"),
    "container_mounts": ("/data:/data:ro", "/root-dir"),
    "rendezvous_address": None,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EVERYTHING,
        {**EVERYTHING, "container_image": "nvcr.io#nvidia/pytorch:26.10-py3"},
        {**EVERYTHING, "container_image": "/images/train.sif", "container_runtime": "apptainer"},
    ],
)
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_the_script_is_sound_shell(run_dir, tmp_path, changes):
    path = tmp_path / "job.sh"
    path.write_text(render_sbatch(_cluster(slurm=changes), _job(run_dir)))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_script_asks_for_what_the_recipe_says(run_dir):
    text = render_sbatch(_cluster(slurm=EVERYTHING), _job(run_dir))
    asked = re.findall(r"^#SBATCH (.*)$", text, re.M)
    for option in (
        *("--nodes=2", "--ntasks-per-node=1", "--partition=gpu,gpu-long", "--account=team-a", "--qos=high"),
        *("--constraint=h100&ib|[a*2]", "--reservation=r_1", "--nodelist=n[1-2]", "--exclude=n9", "--mem=900G"),
        *("--time=2-00:30:00", "--gpus-per-node=h100:2", "--cpus-per-task=16", "--exclusive", "--requeue"),
        *("--open-mode=append", "--signal=B:USR1@300", "--switches=1@00:10:00", f"--output={run_dir}/logs/trainer.log"),
    ):
        assert option in asked
    assert "--nnodes=2 --nproc-per-node=2" in text and "--max-restarts=0" in text
    assert text.index("module load cuda/12.8\n") < text.index("\nsrun ")
    assert "scontrol show hostnames" in text and "address=127.0.0.1" not in text
    assert "--gpus" not in render_sbatch(_cluster(slurm={"gpus_per_node": 0}), _job(run_dir))


def test_containers_come_between_srun_and_the_command(run_dir):
    image = {"container_image": "a/b.sif", "container_mounts": ("/data",)}
    text = render_sbatch(_cluster(slurm=image), _job(run_dir))
    assert "--container-image=a/b.sif --container-mounts=/data \\\n  /bin/sh -c" in text
    assert "athanor / " in text and "python -m torch.distributed.run" in text
    text = render_sbatch(_cluster(slurm={**image, "container_runtime": "apptainer"}), _job(run_dir))
    assert "apptainer exec --nv --bind=/data a/b.sif \\\n  /bin/sh -c" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, "gpu\n#SBATCH --uid=0") for name in ("partition", "account", "qos", "constraint", "reservation")),
        *((name, "a b") for name in ("partition", "nodelist", "exclude", "python", "workdir", "container_image")),
        *((name, "$(id)") for name in ("partition", "time_limit", "memory", "rendezvous_address", "gpu_type")),
        *((name, "a`id`") for name in ("account", "container_image")),
        ("partition", "gpu\n"),
        ("time_limit", "tomorrow"),
        ("extra", ["--wrap=x"]),
        ("extra", ["--output=/etc/passwd"]),
        ("extra", ["--comment=a b"]),
        ("extra", ["-p gpu"]),
        ("setup", ["a\nb"]),
        ("variables", ["AWS_SECRET=1"]),
        ("container_mounts", ["/a /b"]),
        ("signal_seconds", 0),
        ("gpus_per_node", -1),
    ],
)
def test_a_value_that_could_leave_its_place_is_refused(field, value):
    with pytest.raises(ValidationError) as caught:
        SlurmConfig(**{field: value})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize("name", ["a b", "a'b", "a%j", "a\nb", "a$HOME"])
def test_a_path_that_sbatch_would_read_otherwise_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="use a --root of letters, digits"):
        render_sbatch(_cluster(), _job(tmp_path / name / "train-0"))


def test_what_is_shown_is_what_is_submitted_and_kept(slurm, run_dir):
    launcher, job = make_launcher(_cluster()), _job(run_dir)
    shown = launcher.plan(job).encode()
    launcher.submit(job)
    assert (slurm.directory / "submitted").read_bytes() == shown == (run_dir / SBATCH_FILE).read_bytes()


def test_secrets_go_by_name_and_nothing_else_goes_at_all(slurm, run_dir, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-value")
    monkeypatch.setenv("SBATCH_PARTITION", "somewhere-else")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    make_launcher(_cluster()).submit(_job(run_dir))
    text = (run_dir / SBATCH_FILE).read_text()
    (exported,) = re.findall(r"^#SBATCH --export=(.*)$", text, re.M)
    assert "AWS_SECRET_ACCESS_KEY" in exported.split(",") and "ALL" not in exported.split(",")
    assert not any("canary-value" in path.read_text() for path in run_dir.rglob("*") if path.is_file())
    seen = (slurm.directory / "environment").read_text().splitlines()
    assert "AWS_SECRET_ACCESS_KEY=canary-value" in seen and "SLURM_CONF=/etc/slurm.conf" in seen
    assert not any(line.startswith(("SBATCH_", "SLURM_JOB_ID")) for line in seen)


def test_states_are_told_once_and_the_end_is_the_jobs_own(slurm, run_dir):
    said: list[str] = []
    launcher = SlurmLauncher(_cluster())
    handle = launcher.submit(_job(run_dir, on_line=said.append))
    for state, reason in (
        ("PENDING", "Priority"),
        ("CONFIGURING", "None"),
        ("RUNNING", "None"),
        ("COMPLETING", "None"),
    ):
        slurm.say(state, reason=reason)
        _poll_until(launcher, handle, lambda state=state: f"is {state}" in said[-1])
        (run_dir / "logs" / "trainer.log").open("a").write(f"line in {state}\n")
    slurm.ended("COMPLETED", "0:0", file="0")
    while launcher.poll(handle) is None:
        time.sleep(0.02)
    assert launcher.poll(handle) == 0
    assert "slurm: job 7 is PENDING (Priority): it waits for its turn" in said
    assert "slurm: job 7 is RUNNING: it runs on n[1-2]" in said
    assert len(said) == len(set(said)) and "line in COMPLETING" in said
    assert handle.job.log_path.read_text().splitlines() == [
        f"line in {s}" for s in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    ]


@pytest.mark.parametrize(
    ("state", "code", "status", "words"),
    [
        ("FAILED", "3:0", 3, "exit status 3"),
        ("TIMEOUT", "0:15", 143, "is TIMEOUT: it reached its time limit before it had saved; raise execution"),
        ("OUT_OF_MEMORY", "0:125", 253, "is OUT_OF_MEMORY: it ran out of memory; raise execution.cluster.slurm.memory"),
        ("CANCELLED", "0:0", 143, "is CANCELLED: it was cancelled (scancel)"),
        ("NODE_FAIL", "1:0", 1, "is NODE_FAIL: it lost a node"),
        ("PREEMPTED", "0:0", 1, "is PREEMPTED: it had to make room"),
    ],
)
def test_how_a_job_ends_badly(slurm, run_dir, monkeypatch, state, code, status, words):
    monkeypatch.setattr(launch_slurm, "RETURN_SECONDS", 0.3)
    slurm.ended(state, code)
    job = _job(run_dir, on_line=lambda line: None)
    job.log_path.parent.mkdir()
    launcher = SlurmLauncher(_cluster())
    with pytest.raises(JobFailed) as caught:
        run_job(launcher, job, lambda: job.log_path.write_text("a line\n"))
    assert caught.value.exit_status == status and words in str(caught.value)


def test_a_failure_without_a_line_names_the_shared_file_system(slurm, run_dir):
    slurm.ended("FAILED", "0:53")
    with pytest.raises(JobFailed, match="It must lie on a file system that all nodes share"):
        run_job(SlurmLauncher(_cluster()), _job(run_dir))


def test_a_lost_node_is_no_end_while_the_job_may_be_queued_again(slurm, run_dir):
    said: list[str] = []
    launcher = SlurmLauncher(_cluster())
    handle = launcher.submit(_job(run_dir, on_line=said.append))
    slurm.ended("NODE_FAIL", "0:1")
    until = time.monotonic() + 1  # longer than the wait for the files of an ended job
    _poll_until(launcher, handle, lambda: "NODE_FAIL" in said[-1] and time.monotonic() > until)
    slurm.say("PENDING", reason="BeginTime")
    _poll_until(launcher, handle, lambda: "PENDING (BeginTime)" in said[-1])
    assert handle.ended_at is None


def test_a_controller_that_is_away_ends_nothing(slurm, run_dir, monkeypatch):
    said: list[str] = []
    launcher = SlurmLauncher(_cluster())
    slurm.say("RUNNING")
    handle = launcher.submit(_job(run_dir, on_line=said.append))
    (slurm.directory / "down").touch()
    _poll_until(launcher, handle, lambda: "Unable to contact slurm controller" in said[-1])
    assert "the job goes on, asking again" in said[-1]
    (slurm.directory / "down").unlink()
    _poll_until(launcher, handle, lambda: "is RUNNING" in said[-1])
    monkeypatch.setattr(launch_slurm, "OUTAGE_SECONDS", 0.2)
    (slurm.directory / "down").touch()
    with pytest.raises(JobFailed, match="run again to go on waiting"):
        _poll_until(launcher, handle, lambda: False)


def test_a_job_that_the_cluster_has_forgotten_left_its_status_on_disk(slurm, run_dir):
    slurm.say("RUNNING")
    launcher = SlurmLauncher(_cluster())
    handle = launcher.submit(_job(run_dir))
    (slurm.directory / "queue").unlink()
    (run_dir / END_FILE).write_text(f"{JOB_ID} 0\n")
    while (status := launcher.poll(handle)) is None:
        time.sleep(0.02)
    assert status == 0
    (run_dir / END_FILE).write_text("6 0\n")  # left by an earlier job
    with pytest.raises(JobFailed, match="is gone without an exit status"):
        run_job(launcher, _job(run_dir))


def test_a_living_job_that_was_asked_for_the_same_is_not_submitted_twice(slurm, run_dir):
    said: list[str] = []
    SlurmLauncher(_cluster()).submit(_job(run_dir))
    slurm.say("RUNNING", "10:00")
    slurm.say("RUNNING", "10:00", file="living")
    handle = SlurmLauncher(_cluster()).submit(_job(run_dir, on_line=said.append))
    assert handle.job_id == JOB_ID and handle.ran_seconds == 600
    assert said == ["slurm: job 7 is there already (RUNNING); waiting for it"]
    assert len([call for call in slurm.calls() if "--parsable" in call]) == 1


def test_a_living_job_that_was_asked_for_something_else_saves_and_ends_first(slurm, run_dir):
    SlurmLauncher(_cluster()).submit(_job(run_dir))
    slurm.say("RUNNING")
    slurm.say("RUNNING", file="living")
    slurm.say("CANCELLED", "1:00", file="cancelled")
    (run_dir / "run.json").write_text('{"changed": 1}')
    SlurmLauncher(_cluster()).submit(_job(run_dir))
    kinds = [shlex.split(call)[0] for call in slurm.calls()]
    assert kinds == ["--parsable", "scancel", "--parsable"]
    assert "--batch --signal=TERM 7" in slurm.calls()[1]


def test_the_deadline_counts_the_time_that_it_runs(slurm, run_dir):
    launcher = SlurmLauncher(_cluster(timeout_seconds=0.4))
    slurm.say("PENDING")
    slurm.say("CANCELLED", "1:00", file="cancelled")
    handle = launcher.submit(_job(run_dir))
    until = time.monotonic() + 1
    _poll_until(launcher, handle, lambda: time.monotonic() > until)
    slurm.say("RUNNING")
    with pytest.raises(JobFailed, match=r"timeout_seconds=0\.4") as caught:
        _poll_until(launcher, handle, lambda: False)
    assert caught.value.exit_status == 124 and "--batch --signal=TERM" in slurm.calls()[-1]


def test_who_does_not_end_after_its_grace_is_cancelled_by_force(slurm, run_dir):
    launcher = SlurmLauncher(_cluster(stop_grace_seconds=0.3))
    handle = launcher.submit(_job(run_dir))
    slurm.say("PENDING")
    launcher.poll(handle)
    slurm.say("CANCELLED", "0:00", file="cancelled")
    launcher.cancel(handle)
    assert slurm.calls()[-1] == "scancel --quiet 7"
    launcher.cancel(handle)  # an ended job is not cancelled
    assert sum("scancel" in call for call in slurm.calls()) == 1


def test_without_slurm_the_way_out_is_named_before_work_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needs sbatch, squeue, scancel, scontrol on PATH: run it on a login node"):
        check_launcher(_cluster())
    assert "#SBATCH" in make_launcher(_cluster()).plan(_job(tmp_path / "train-0"))


def test_what_sbatch_refuses_is_the_users_to_mend(slurm, run_dir):
    (slurm.directory / "refusal").write_text("sbatch: error: Batch job submission failed: Invalid partition name\n")
    with pytest.raises(
        InputError, match=r"Batch job submission failed: Invalid partition name; see execution\.cluster"
    ):
        SlurmLauncher(_cluster()).submit(_job(run_dir))


@pytest.mark.parametrize(("text", "seconds"), [("0:05", 5), ("1:00:00", 3600), ("2-03:04:05", 183845), ("INVALID", 0)])
def test_times_of_the_queue(text, seconds):
    assert seconds_of(text) == seconds


def _run_script(run_dir: Path, tell: int | None, result: str = "stopped", **variables: str) -> int:
    """Run the rendered file by hand, with an srun that gets a signal or ends by itself."""
    path = run_dir / SBATCH_FILE
    path.write_text(render_sbatch(_cluster(), _job(run_dir)))
    (run_dir / "result.json").write_text('{"status": "stopped"}')  # left by an earlier try
    fake = Path(os.environ["FAKE"])
    (fake / "result").write_text(f'{{\n "status": "{result}"\n}}\n')
    own = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", **variables}
    process = subprocess.Popen(["bash", str(path)], cwd=run_dir, env={**os.environ, **own}, start_new_session=True)
    try:
        if tell is not None:
            deadline = time.monotonic() + 20
            while not (fake / "step").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(tell)
        return process.wait(20)
    finally:
        process.poll() is None and os.killpg(process.pid, signal.SIGKILL)


def test_the_signal_before_the_time_limit_saves_and_queues_again(slurm, run_dir):
    assert _run_script(run_dir, signal.SIGUSR1) != 0  # the requeue itself ends it
    assert slurm.calls() == ["scancel --quiet --signal=TERM 7", "scontrol requeue 7"]
    assert not (run_dir / END_FILE).exists()


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, run_dir):
    assert _run_script(run_dir, signal.SIGTERM) == 75
    assert slurm.calls() == ["scancel --quiet --signal=TERM 7"]
    assert (run_dir / END_FILE).read_text() == "7 75\n"


def test_a_job_that_did_not_save_is_not_queued_again(slurm, run_dir):
    assert _run_script(run_dir, signal.SIGUSR1, result="failed") == 1
    assert slurm.calls() == ["scancel --quiet --signal=TERM 7"]


@pytest.mark.parametrize("status", ["0", "2"])
def test_a_job_that_ends_by_itself_hands_on_its_status(slurm, run_dir, status):
    assert _run_script(run_dir, None, SRUN_STATUS=status, SRUN_TENTHS="1") == int(status)
    assert (run_dir / END_FILE).read_text() == f"7 {status}\n" and not (run_dir / "result.json").exists()
    assert "--rdzv-endpoint=127.0.0.1:20007" in (slurm.directory / "srun").read_text()


def test_a_node_that_does_not_see_the_root_says_so(run_dir, capfd):
    text = render_sbatch(_cluster(), _job(run_dir))
    (on_node,) = re.findall(r"^readonly on_node='\n(.*?)'$", text, re.M | re.S)
    done = subprocess.run(["/bin/sh", "-c", on_node, "athanor", "/", "/no/run.json", "true"], capture_output=True)
    assert done.returncode == 2 and b"does not see /no/run.json; the root must lie on" in done.stderr
    run_json = str(run_dir / "run.json")
    assert subprocess.run(["/bin/sh", "-c", on_node, "athanor", "/", run_json, "true"]).returncode == 0
