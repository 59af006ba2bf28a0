"""The Kubernetes launcher: manifests checked by Kubeflow's own models, and jobs on an API server that runs pods as
processes."""

import json
import os
import shutil
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1ClusterTrainingRuntime, TrainerV1alpha1TrainJob

from dataset_builders.errors import InputError
from stages.launchers.config import ClusterConfig
from stages.launchers.job import Job, JobFailed, check_launcher, make_launcher, run_job
from stages.launchers.kubernetes import client
from stages.launchers.kubernetes.client import LogFollower
from stages.launchers.kubernetes.launcher import KubernetesHandle, KubernetesLauncher
from stages.launchers.kubernetes.trainjob import make_trainjob, trainjob_name
from stages.launchers.rank_logs import as_rank
from tests.helpers.fake_kubernetes import FakeCluster, fake_cluster, pod_spec_of
from tests.helpers.run_dir import metrics_of, result_of, write_job

REPO = Path(__file__).parents[4]


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Iterator[FakeCluster]:
    """Yield a cluster that the kubeconfig points to, and remove everything of it afterwards."""
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with fake_cluster(tmp_path / "kubeconfig") as cluster:
        cluster.command = [sys.executable]
        yield cluster
    left = [p for p in psutil.process_iter() if _belongs(p, str(tmp_path))]
    for process in left:
        process.kill()
    assert not left


def _belongs(process: psutil.Process, text: str) -> bool:
    try:
        is_over = process.status() == psutil.STATUS_ZOMBIE
        return not is_over and any(text in part for part in process.cmdline())
    except psutil.Error:
        return False


def _cluster(tmp_path: Path, **changes) -> ClusterConfig:
    kubernetes = {
        "image": "registry.example/athanor-train:1",
        "claim": "athanor-root",
        "mount_path": str(tmp_path),
        "poll_seconds": 0.1,
        **changes.pop("kubernetes", {}),
    }
    return ClusterConfig(**{"launcher": "kubernetes", "stop_grace_seconds": 5, "kubernetes": kubernetes, **changes})


def _launcher(tmp_path: Path, **changes) -> KubernetesLauncher:
    return make_launcher(_cluster(tmp_path, **changes))


def _job(tmp_path: Path, code: str = "", **kwargs) -> Job:
    """Return a job whose trainer is a few lines of Python, which the fake cluster runs instead."""
    directory = tmp_path / "root" / "train-1"
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "job.py"
    script.write_text(textwrap.dedent(code))
    return Job(str(directory), ("-m", "trainer", str(script)), directory / "logs" / "trainer.log", **kwargs)


def _own_lines(lines) -> list[str]:
    return [line for line in lines if not line.startswith("kubernetes: ")]


def _poll_until(launcher: KubernetesLauncher, handle: KubernetesHandle, condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert launcher.poll(handle) is None and time.monotonic() < deadline
        time.sleep(0.02)


SAVES = """
    import signal, sys, time
    def save(*_):
        time.sleep(0.3)
        open(sys.argv[0] + ".saved", "w").write("saved")
        print("saved", flush=True)
        sys.exit(1)
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(60)
"""


# --- the manifest


def _full(tmp_path: Path) -> ClusterConfig:
    kubernetes = {
        "namespace": "team",
        "context": "prod",
        "cpus_per_node": 64,
        "memory_per_node": "900Gi",
        "secret": "athanor-s3",
        "service_account": "trainer",
        "run_as_user": 1000,
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "labels": {"kueue.x-k8s.io/queue-name": "team"},
    }
    return _cluster(tmp_path, nodes=2, processes=16, timeout_seconds=3600.5, kubernetes=kubernetes)


def test_the_manifest_is_what_kubeflows_models_know(tmp_path):
    manifest = make_trainjob(_full(tmp_path), _job(tmp_path))
    # The models ignore unknown fields, so a field that they leave out is misspelt.
    assert TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest
    wrong = json.loads(json.dumps(manifest))
    wrong["spec"]["trainer"]["nodes"] = 2
    assert TrainerV1alpha1TrainJob.from_dict(wrong).to_dict() != wrong


def test_the_manifest_asks_for_what_the_recipe_says(tmp_path):
    job = _job(tmp_path)
    manifest = make_trainjob(_full(tmp_path), job)
    trainer = manifest["spec"]["trainer"]
    rank = as_rank(job.log_path.parent, ["python", *job.arguments])
    assert trainer["command"][:3] == ["torchrun", "--max-restarts=0", "--no-python"]
    assert [word.replace("$$(", "$(") for word in trainer["command"][3:]] == rank
    assert "$(" not in " ".join(trainer["command"]).replace("$$(", "")  # Kubernetes would expand a variable
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "64", "memory": "900Gi", "nvidia.com/gpu": "8"}
    assert manifest["spec"]["activeDeadlineSeconds"] == 3601
    values = {variable["name"]: variable for variable in trainer["env"]}
    assert values["OMP_NUM_THREADS"]["value"] == "8"
    assert values["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "athanor-s3"
    assert not [name for name in values if name.startswith("PET_")]  # Trainer refuses its own variables
    pod = pod_spec_of(manifest)
    assert pod["terminationGracePeriodSeconds"] == 15 and pod["securityContext"]["fsGroup"] == 1000
    assert {"name": "root", "mountPath": str(tmp_path)} in pod["containers"][0]["volumeMounts"]
    assert "env" not in pod["containers"][0]  # Trainer refuses it in a patch of this container


def test_no_secret_is_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-4711")
    plan = _launcher(tmp_path, kubernetes={"secret": "athanor-s3"}).plan(_job(tmp_path))
    assert "canary" not in plan and yaml.safe_load(plan)["kind"] == "TrainJob"


def test_a_run_on_cpu_asks_for_no_gpu(tmp_path):
    manifest = make_trainjob(_cluster(tmp_path, processes=2, kubernetes={"gpus_per_node": 0}), _job(tmp_path))
    assert manifest["spec"]["trainer"]["resourcesPerNode"] == {"requests": {}, "limits": {}}


def test_the_name_is_the_works(tmp_path):
    job = _job(tmp_path)
    assert trainjob_name(job) == trainjob_name(_job(tmp_path, "other"))
    long = Job("/athanor/Artifacts/_Train__" + "x" * 300, (), tmp_path)
    assert trainjob_name(long) != trainjob_name(job)
    for name in (trainjob_name(job), trainjob_name(long)):
        assert len(name) <= 50 and name.replace("-", "").isalnum() and name == name.lower()


@pytest.mark.parametrize("name", ["image", "claim"])
def test_what_has_no_default_is_asked_for(tmp_path, name):
    with pytest.raises(InputError, match=f"execution.cluster.kubernetes.{name} is not set"):
        _launcher(tmp_path, kubernetes={name: None})


def test_a_path_outside_of_the_claim_is_refused_before_anything_starts(tmp_path, fake):
    run = write_job(tmp_path / "root", num_steps=3)  # its model is in another directory
    job = Job(str(run.output_dir), ("-m", "trainer", str(run.output_dir / "run.json")), run.output_dir / "log")
    with pytest.raises(InputError, match=r"hf_dir=/.* lies outside of execution.cluster.kubernetes.mount_path"):
        _launcher(tmp_path).submit(job)
    with pytest.raises(InputError, match=r"run.json=/.* lies outside"):
        _launcher(tmp_path, kubernetes={"mount_path": "/elsewhere"}).plan(job)
    assert not fake.calls


@pytest.mark.parametrize(
    "field, value",
    [
        ("mount_path", "athanor"),
        ("mount_path", "/athanor/"),
        ("memory_per_node", "512"),
        ("namespace", "Team A"),
        ("secret_variables", ["key=value"]),
        ("gpus_per_node", -1),
        ("image", "athanor train"),
    ],
)
def test_bounds(tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        _cluster(tmp_path, kubernetes={field: value})


def test_the_runtime_restarts_nothing():
    runtime = yaml.safe_load((REPO / "infra" / "kubernetes" / "runtime.yaml").read_text())
    assert TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict() == runtime
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["node"] and runtime["spec"]["mlPolicy"]["torch"] == {}
    assert jobs[0]["template"]["spec"]["backoffLimit"] == 0
    assert jobs[0]["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert runtime["metadata"]["name"] == ClusterConfig().kubernetes.runtime


# --- jobs


def test_lines_reach_the_callback_and_the_log(tmp_path, fake):
    seen = []
    job = _job(tmp_path, "print('one'); print('two')", on_line=seen.append)
    run_job(_launcher(tmp_path), job)
    assert _own_lines(seen) == ["one", "two"]
    assert job.log_path.read_text().splitlines() == seen
    assert (tmp_path / "root" / "train-1" / "trainjob.yaml").read_text() == _launcher(tmp_path).plan(job)


def test_a_stream_that_breaks_loses_and_doubles_no_line(tmp_path, fake):
    code = "import time\nfor i in range(300):\n    print('line', i, flush=True)\n    time.sleep(0.004)"
    job, launcher, breaks = _job(tmp_path, code), _launcher(tmp_path), 0
    handle = launcher.submit(job)
    while (status := launcher.poll(handle)) is None:
        if breaks < 5 and not fake.breaks:
            fake.breaks = 1
            breaks += 1
        time.sleep(0.02)
    assert status == 0 and breaks > 1
    assert _own_lines(handle.job.log_path.read_text().splitlines()) == [f"line {i}" for i in range(300)]
    assert sum("sinceTime=" in call for call in fake.calls) >= breaks


def _rest(readings: list[list[str]]) -> tuple[list[str], list[str | None]]:
    """Return the result of a follower that reads the log in these portions, and the times that it asked for."""
    asked: list[str | None] = []

    def follow(since: str | None) -> list[bytes]:
        asked.append(since)
        if not readings:
            raise client.ClusterError("the pod is gone", False)
        return [f"2026-01-01T00:00:{line}".encode() for line in readings.pop(0)]

    return LogFollower(follow, 60).rest(10), asked


def test_the_end_of_a_log_is_found_however_often_its_reading_breaks():
    whole = ["01.1Z a\n", "02.2Z b\n", "03.3Z c\n"]
    readings = [["01.1Z a\n", "02.2"], ["01.1Z a\n", "0"], ["01.1Z a\n"], whole, *[whole[2:]] * 9]
    lines, asked = _rest(readings)
    assert lines == ["a", "b", "c"]
    assert asked[:5] == [None, *["2026-01-01T00:00:01Z"] * 3, "2026-01-01T00:00:03Z"]
    assert len(readings) in (6, 7)  # two brought nothing; the first may have begun before the end was known


def test_lines_of_one_second_are_told_apart():
    first = ["01.1+02:00 a\n", "02.2+02:00 b\n", "02.2+02:00 b\n"]
    late = ["02.2+02:00 b\n", "02.2+02:00 b\n", "02.2+02:00 b\n", "02.15+02:00 late\n", "01.9+02:00 later\n"]
    lines, asked = _rest([first, late, [line for line in late if line.startswith("02")]])
    assert lines == ["a", "b", "b", "b", "late", "later"]
    assert asked[1:3] == ["2026-01-01T00:00:02+02:00"] * 2


def test_a_log_that_falls_silent_can_be_closed(tmp_path, fake):
    launcher = _launcher(tmp_path)
    handle = launcher.submit(_job(tmp_path, SAVES))
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    handle.log.close()
    handle.log._thread.join(5)
    assert not handle.log._thread.is_alive()
    launcher.cancel(handle)


def test_failure_tells_command_status_log_and_last_lines(tmp_path, fake):
    job = _job(tmp_path, "import sys\nprint('bad news')\nsys.exit(3)")
    with pytest.raises(JobFailed) as caught:
        run_job(_launcher(tmp_path), job)
    text = str(caught.value)
    assert caught.value.exit_status == 3 and "kubectl apply -f" in text and str(job.log_path) in text
    assert "bad news" in text and "ended: Error, status 3" in text


def test_the_pod_that_failed_first_is_heard(tmp_path, fake):
    code = """
        import os, sys, time
        print("node", os.environ["PET_NODE_RANK"], flush=True)
        time.sleep(0 if os.environ["PET_NODE_RANK"] == "1" else 60)
        sys.exit(9)
    """
    job = _job(tmp_path, code)
    with pytest.raises(JobFailed, match="exit status 9"):
        run_job(_launcher(tmp_path, nodes=2, processes=2), job)
    lines = job.log_path.read_text().splitlines()
    assert lines.index(f"kubernetes: {trainjob_name(job)}-node-0-1-abcde failed first; the end of its log:") < (
        lines.index("node 1")
    )


def test_out_of_memory_is_said(tmp_path, fake):
    job = _job(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(JobFailed, match=r"^pod athanor-train-1-\w+-node-0-0-abcde: OOMKilled") as caught:
        run_job(_launcher(tmp_path), job)
    assert caught.value.exit_status == 137


def test_an_outage_is_no_end_of_the_job(tmp_path, fake):
    job = _job(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(1)\nprint('done')")
    launcher = _launcher(tmp_path)
    handle = launcher.submit(job)
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    fake.outage = True
    _poll_until(launcher, handle, lambda: any("the job goes on" in line for line in handle.lines))
    fake.outage = False
    run = time.monotonic() + 120
    while (status := launcher.poll(handle)) is None and time.monotonic() < run:
        time.sleep(0.02)
    assert status == 0 and _own_lines(handle.job.log_path.read_text().splitlines()) == ["ready", "done"]


def test_a_cluster_that_stays_silent_is_given_up(tmp_path, fake, monkeypatch):
    monkeypatch.setattr("stages.launchers.kubernetes.launcher.OUTAGE_SECONDS", 0.5)
    launcher = _launcher(tmp_path)
    handle = launcher.submit(_job(tmp_path, SAVES))
    fake.outage = True
    with pytest.raises(JobFailed, match="no answer about TrainJob"):
        _poll_until(launcher, handle, lambda: False)
    fake.outage = False
    launcher.cancel(handle)


def test_cancel_gives_time_to_save_and_leaves_nothing(tmp_path, fake):
    launcher = _launcher(tmp_path)
    handle = launcher.submit(_job(tmp_path, SAVES))
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    launcher.cancel(handle)
    assert (tmp_path / "root" / "train-1" / "job.py.saved").read_text() == "saved"
    assert "saved" in handle.lines
    assert not fake.trainjobs and not fake.pods


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path, fake, monkeypatch):
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"
    monkeypatch.setattr("stages.launchers.kubernetes.trainjob.LEFTOVER_SECONDS", 1)
    launcher = _launcher(tmp_path, stop_grace_seconds=1)
    handle = launcher.submit(_job(tmp_path, code + "time.sleep(100)"))
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    launcher.cancel(handle)
    assert not fake.pods


def test_pods_of_a_lost_node_are_removed_by_force(tmp_path, fake, monkeypatch):
    monkeypatch.setattr("stages.launchers.kubernetes.launcher.LEFTOVER_SECONDS", 0)
    monkeypatch.setattr("stages.launchers.kubernetes.launcher.DELETE_SECONDS", 4)
    launcher = _launcher(tmp_path, stop_grace_seconds=1)
    handle = launcher.submit(_job(tmp_path, SAVES))
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    fake.lost = True
    launcher.cancel(handle)
    assert not fake.pods and not fake.trainjobs and fake.count("DELETE pods/") == 1


def test_the_deadline_is_kept(tmp_path, fake):
    with pytest.raises(JobFailed, match="timeout_seconds=1") as caught:
        run_job(_launcher(tmp_path, timeout_seconds=1), _job(tmp_path, SAVES))
    assert caught.value.exit_status == 124
    assert not fake.trainjobs


def test_the_clusters_own_deadline_is_the_same_error(tmp_path, fake):
    why = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"}
    fake.condition = why
    launcher = _launcher(tmp_path)
    with pytest.raises(JobFailed, match="timeout_seconds") as caught:
        run_job(launcher, _job(tmp_path, "import time\ntime.sleep(0.5)"))
    assert caught.value.exit_status == 124
    launcher.cancel(launcher.submit(_job(tmp_path, "print('the next one')")))


def test_the_next_try_goes_on_with_a_living_job(tmp_path, fake):
    code = "import time\nprint('begun', flush=True)\ntime.sleep(2)\nprint('done')"
    launcher = _launcher(tmp_path)
    left = launcher.submit(_job(tmp_path, code))
    _poll_until(launcher, left, lambda: "begun" in left.lines)
    left.log.close()  # as after a kill -9 of the flow
    seen = []
    run_job(_launcher(tmp_path), _job(tmp_path, code, on_line=seen.append))
    assert _own_lines(seen) == ["begun", "done"] and any("going on with it" in line for line in seen)
    assert fake.count("POST trainjobs") == 1


def test_a_living_job_of_other_settings_is_ended_first(tmp_path, fake):
    launcher = _launcher(tmp_path)
    left = launcher.submit(_job(tmp_path, SAVES))
    _poll_until(launcher, left, lambda: "ready" in left.lines)
    left.log.close()
    job = _job(tmp_path, "print('second')")  # same name, other file content
    run_job(_launcher(tmp_path), job)
    assert _own_lines(job.log_path.read_text().splitlines()) == ["second"]
    assert (tmp_path / "root" / "train-1" / "job.py.saved").exists()


def test_an_ended_job_makes_room_for_the_next_try(tmp_path, fake):
    for count in (1, 2):
        with pytest.raises(JobFailed, match="exit status 3"):
            run_job(_launcher(tmp_path), _job(tmp_path, "import sys; sys.exit(3)"))
        assert fake.count("POST trainjobs") == count


def test_a_job_that_somebody_deleted(tmp_path, fake):
    launcher = _launcher(tmp_path)
    handle = launcher.submit(_job(tmp_path, SAVES))
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    launcher.api.delete_trainjob(handle.name)
    with pytest.raises(JobFailed, match="somebody deleted TrainJob"):
        _poll_until(launcher, handle, lambda: False)
    assert not fake.pods


def test_what_a_job_waits_for_is_said_once(tmp_path, fake):
    fake.hold = True
    why = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": "no quota"}
    fake.condition = why
    launcher = _launcher(tmp_path)
    handle = launcher.submit(_job(tmp_path))
    _poll_until(launcher, handle, lambda: any("no gpu" in line for line in handle.lines))
    calls = fake.count("GET pods")
    _poll_until(launcher, handle, lambda: fake.count("GET pods") > calls + 1)
    lines = handle.job.log_path.read_text().splitlines()
    assert len([line for line in lines if "no gpu" in line]) == 1
    assert len([line for line in lines if "no quota" in line]) == 1
    launcher.cancel(handle)


# --- errors that a person can fix


def test_without_the_package_the_manifest_is_there_all_the_same(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(client, "kubernetes", None)
    missing = r"needs the package kubernetes, which is not installed; pip install -e '.\[kubernetes\]'"
    with pytest.raises(InputError, match=missing) as caught:
        _launcher(tmp_path).submit(_job(tmp_path))
    path = tmp_path / "root" / "train-1" / "trainjob.yaml"
    assert str(caught.value).endswith(f"kubectl apply -f {path}")
    assert yaml.safe_load(path.read_text())["kind"] == "TrainJob"
    assert yaml.safe_load(_launcher(tmp_path).plan(_job(tmp_path)))["kind"] == "TrainJob"
    with pytest.raises(InputError, match=missing):
        check_launcher(_cluster(tmp_path))  # before any stage runs


@pytest.mark.parametrize("context", [None, "nowhere"])
def test_without_a_kubeconfig_the_file_is_named(tmp_path, fake, monkeypatch, context):
    path = tmp_path / ("kubeconfig" if context else "none")
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(InputError, match=f"finds no cluster by KUBECONFIG={path}") as caught:
        check_launcher(_cluster(tmp_path, kubernetes={"context": context}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (400, 'unknown field "spec.trainer.nodes"', r'unknown field "spec.trainer.nodes" \(status 400\)'),
        (403, "user cannot create trainjobs", "user cannot create trainjobs"),
        (404, "404 page not found", "knows no TrainJob .* install Kubeflow Trainer"),
    ],
)
def test_a_cluster_that_refuses(tmp_path, fake, status, answer, told):
    fake.refusal = (status, answer)
    with pytest.raises(InputError, match=rf"^cannot make the TrainJob: .*{told}.*the manifest is /"):
        _launcher(tmp_path).submit(_job(tmp_path))
    assert fake.count("POST trainjobs") == 1  # a second try would not help


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_cluster_that_cannot_now_is_asked_again(tmp_path, fake, status):
    fake.refusal = (status, "etcdserver: leader changed")
    threading.Timer(0.5, setattr, (fake, "refusal", None)).start()
    job = _job(tmp_path, "print('here')")
    run_job(_launcher(tmp_path), job)
    assert "leader changed" in job.log_path.read_text()


def test_a_cluster_that_does_not_answer_at_submit(tmp_path, fake, monkeypatch):
    fake.outage = True
    monkeypatch.setattr("stages.launchers.kubernetes.launcher.SUBMIT_SECONDS", 0.3)
    with pytest.raises(InputError, match="the API server does not answer"):
        _launcher(tmp_path).submit(_job(tmp_path))
    monkeypatch.setattr("stages.launchers.kubernetes.launcher.SUBMIT_SECONDS", 60)
    threading.Timer(0.5, setattr, (fake, "outage", False)).start()
    run_job(_launcher(tmp_path), _job(tmp_path, "print('here')"))


# --- the trainer itself


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.full  # core tier: the command and variables of a pod, and its life around a small script
def test_two_pods_train_and_go_on_after_they_were_cancelled(tmp_path, fake):
    """Uses torchrun's real command line with the variables that the torch plugin sets, two nodes of one process
    each."""
    fake.command, fake.port = [], _free_port()
    run = write_job(tmp_path / "root", num_steps=60, save_interval=20)  # enough steps to be cancelled while it runs
    run = run.model_copy(update={"hf_dir": shutil.copytree(run.hf_dir, tmp_path / "root" / "hf")})
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    launcher = _launcher(tmp_path, nodes=2, processes=2, stop_grace_seconds=120, kubernetes={"gpus_per_node": 0})
    job = Job(str(run.output_dir), ("-m", "trainer", str(run.output_dir / "run.json")), run.output_dir / "logs" / "log")
    handle = launcher.submit(job)
    _poll_until(launcher, handle, lambda: len(metrics_of(run)) >= 2)
    launcher.cancel(handle)
    assert result_of(run).status == "stopped" and result_of(run).checkpoint
    fake.port = _free_port()
    run_job(launcher, job)
    assert result_of(run).status == "finished" and [row.step for row in metrics_of(run)] == list(range(1, 61))
    assert (job.log_path.parent / "rank-0001.log").is_file()
