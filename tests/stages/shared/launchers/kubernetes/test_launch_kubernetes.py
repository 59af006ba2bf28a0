"""The Kubernetes launcher: manifests checked by Kubeflow's own models, and jobs on an API server that runs pods as
processes."""

import json
import os
import re
import shutil
import signal
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
from stages.shared.launchers import kubernetes as launch_kubernetes
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Job, JobFailed, as_rank, check_launcher, make_launcher, run_job
from stages.shared.launchers.kubernetes import KubernetesHandle, KubernetesLauncher, make_trainjob, trainjob_name
from tests.helpers.fake_kubernetes import FakeCluster, fake_cluster, pod_spec_of
from tests.helpers.patience import at_most
from tests.helpers.run_dir import metrics_of, result_of, write_job

pytestmark = pytest.mark.promise(
    "A TrainJob fits Kubeflow Trainer's models and runs against a stand-in for the API server."
)

REPO = Path(__file__).parents[5]


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Iterator[FakeCluster]:
    """Yield a cluster that the kubeconfig points to, and remove everything of it afterwards."""
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("stages.shared.launchers.scheduled.LOOK_SECONDS", 0.1)
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


def _trainjob(tmp_path: Path) -> dict:
    """Return the example of a job file, with the root at `tmp_path`."""
    trainjob = yaml.safe_load((REPO / "infra" / "kubernetes" / "trainjob.yaml").read_text())
    pod_spec_of(trainjob)["containers"][0]["volumeMounts"][0]["mountPath"] = str(tmp_path)
    return trainjob


def _cluster(tmp_path: Path, trainjob: dict | None = None, **changes) -> ClusterConfig:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(trainjob or _trainjob(tmp_path)))
    return ClusterConfig(**{"launcher": "kubernetes", "stop_grace_seconds": 5, "job_file": path, **changes})


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
    """Return the job's lines, without those of the launcher."""
    return [line for line in lines if not line.startswith("kubernetes: ")]


def _poll_until(launcher: KubernetesLauncher, handle: KubernetesHandle, condition) -> None:
    deadline = time.monotonic() + at_most(120)
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


def _started(tmp_path: Path, code: str = SAVES, **changes) -> tuple[KubernetesLauncher, KubernetesHandle]:
    """Return a launcher and its job, which has printed its first line."""
    launcher = _launcher(tmp_path, **changes)
    handle = launcher.submit(_job(tmp_path, code))
    _poll_until(launcher, handle, lambda: handle.lines)
    return launcher, handle


# --- the manifest


def test_the_manifest_is_what_kubeflows_models_know(tmp_path):
    manifest = make_trainjob(_cluster(tmp_path, nodes=2, processes=16), _job(tmp_path))
    # The models ignore unknown fields, so a field that they leave out is misspelt.
    assert TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest
    wrong = json.loads(json.dumps(manifest))
    wrong["spec"]["trainer"]["nodes"] = 2
    assert TrainerV1alpha1TrainJob.from_dict(wrong).to_dict() != wrong


def test_the_manifest_is_the_users_with_this_job(tmp_path):
    job, own = _job(tmp_path), _trainjob(tmp_path)
    manifest = make_trainjob(_cluster(tmp_path, nodes=2, processes=16, timeout_seconds=3600.5), job)
    trainer = manifest["spec"]["trainer"]
    rank = as_rank(job.log_path.parent, ["python", *job.arguments])
    assert trainer["command"][3:7] == [str(job.log_path), "torchrun", "--max-restarts=0", "--no-python"]
    assert [word.replace("$$(", "$(") for word in trainer["command"][7:]] == rank
    assert "$(" not in " ".join(trainer["command"]).replace("$$(", "")  # Kubernetes would expand a variable
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert manifest["spec"]["activeDeadlineSeconds"] == 3601
    values = {variable["name"]: variable for variable in trainer["env"]}
    assert values["OMP_NUM_THREADS"]["value"] == "8"
    assert not [name for name in values if name.startswith("PET_")]  # Trainer refuses its own variables
    pod = pod_spec_of(manifest)
    assert pod["terminationGracePeriodSeconds"] == 15
    assert "env" not in pod["containers"][0]  # Trainer refuses it in a patch of this container
    # All that the file says is there as it was.
    assert manifest["metadata"]["labels"].items() > own["metadata"]["labels"].items()
    assert trainer["env"][-2:] == own["spec"]["trainer"]["env"]
    assert trainer["resourcesPerNode"] == own["spec"]["trainer"]["resourcesPerNode"]
    assert pod == {**pod_spec_of(own), "terminationGracePeriodSeconds": 15}
    own["spec"]["trainer"]["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    env = make_trainjob(_cluster(tmp_path, own), job)["spec"]["trainer"]["env"]
    assert [variable["value"] for variable in env if variable["name"] == "OMP_NUM_THREADS"] == ["1"]


def test_no_secret_is_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-4711")
    plan = _launcher(tmp_path).plan(_job(tmp_path))
    assert "canary" not in plan and yaml.safe_load(plan)["kind"] == "TrainJob"


def test_the_name_is_the_works(tmp_path):
    job = _job(tmp_path)
    assert trainjob_name(job) == trainjob_name(_job(tmp_path, "other"))
    long = Job("/athanor/Artifacts/_Train__" + "x" * 300, (), tmp_path)
    assert trainjob_name(long) != trainjob_name(job)
    for name in (trainjob_name(job), trainjob_name(long)):
        assert len(name) <= 50 and name.replace("-", "").isalnum() and name == name.lower()


def _without(path: str):
    """Return a change that removes a part of a TrainJob."""

    def change(trainjob: dict) -> None:
        *parents, last = path.split(".")
        for key in parents:
            trainjob = trainjob[key]
        del trainjob[last]

    return change


REFUSED = {
    "metadata.namespace is missing; the file is your TrainJob in YAML; start from infra": _without(
        "metadata.namespace"
    ),
    "spec.runtimeRef.name is missing": _without("spec.runtimeRef"),
    "spec.trainer.image is missing": _without("spec.trainer.image"),
    "spec.trainer.resourcesPerNode.limits is missing": _without("spec.trainer.resourcesPerNode"),
    "spec.runtimePatches[0].trainingRuntimeSpec.template": _without("spec.runtimePatches"),
    "containers[node].volumeMounts is missing": lambda job: pod_spec_of(job)["containers"].clear(),
    "has kind='Pod', but this run needs 'TrainJob'": lambda job: job.update(kind="Pod"),
    "metadata has name='mine', but this run needs 'athanor-train-1-": lambda job: job["metadata"].update(name="mine"),
    "spec.trainer has numNodes=4, but this run needs 2": lambda job: job["spec"]["trainer"].update(numNodes=4),
    "spec.trainer has command=['sh']": lambda job: job["spec"]["trainer"].update(command=["sh"]),
    "spec has activeDeadlineSeconds=9": lambda job: job["spec"].update(activeDeadlineSeconds=9),
    "has terminationGracePeriodSeconds=30": lambda job: pod_spec_of(job).update(terminationGracePeriodSeconds=30),
    "limits gives a node no GPUs, but execution.cluster.processes=16 on nodes=2 need 8; write nvidia.com/gpu: 8": (
        lambda job: _limits(job).pop("nvidia.com/gpu")
    ),
    "limits gives a node 4 GPUs": lambda job: _limits(job).update({"nvidia.com/gpu": 4}),
    "run.json=/": lambda job: pod_spec_of(job)["volumes"][0].update(emptyDir={}),
}


def _limits(trainjob: dict) -> dict:
    return trainjob["spec"]["trainer"]["resourcesPerNode"]["limits"]


@pytest.mark.parametrize("told", REFUSED)
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path, told):
    trainjob = _trainjob(tmp_path)
    REFUSED[told](trainjob)
    with pytest.raises(InputError, match=re.escape(told)) as caught:
        _launcher(tmp_path, trainjob=trainjob, nodes=2, processes=16).plan(_job(tmp_path))
    assert str(tmp_path / "job.yaml") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- a list", "text", ""])
def test_a_file_that_is_no_trainjob_is_refused_in_one_line(tmp_path, text):
    cluster = _cluster(tmp_path)
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InputError, match=r"job.yaml(: metadata.namespace is missing| is not YAML)") as caught:
        make_launcher(cluster)
    assert "\n" not in str(caught.value)


def test_a_run_on_cpu_has_0_gpus(tmp_path):
    trainjob = _trainjob(tmp_path)
    _limits(trainjob)["nvidia.com/gpu"] = "0"
    assert _launcher(tmp_path, trainjob=trainjob, processes=2).plan(_job(tmp_path))


def test_a_path_outside_of_the_volumes_is_refused_before_anything_starts(tmp_path, fake):
    run = write_job(tmp_path / "root", num_steps=3)  # its model is in another directory
    job = Job(str(run.output_dir), ("-m", "trainer", str(run.output_dir / "run.json")), run.output_dir / "log")
    with pytest.raises(InputError, match=r"hf_dir=/.* lies outside of the volumes that /.*job.yaml mounts \(/"):
        _launcher(tmp_path, trainjob=_trainjob(tmp_path / "root")).submit(job)
    assert not fake.calls


def test_the_runtime_restarts_nothing():
    runtime = yaml.safe_load((REPO / "infra" / "kubernetes" / "runtime.yaml").read_text())
    assert TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict() == runtime
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["node"] and runtime["spec"]["mlPolicy"]["torch"] == {}
    assert jobs[0]["template"]["spec"]["backoffLimit"] == 0
    assert jobs[0]["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert runtime["metadata"]["name"] == _trainjob(REPO)["spec"]["runtimeRef"]["name"]


# --- jobs


def test_lines_reach_the_callback_and_the_log(tmp_path, fake):
    seen = []
    job = _job(tmp_path, "print('one'); print('two')", on_line=seen.append)
    run_job(_launcher(tmp_path), job)
    assert _own_lines(seen) == job.log_path.read_text().splitlines() == ["one", "two"]
    assert (tmp_path / "root" / "train-1" / "trainjob.yaml").read_text() == _launcher(tmp_path).plan(job)


def test_only_the_first_pod_writes_the_log_and_its_own_output_says_where(tmp_path, fake):
    job = _job(tmp_path, "import os\nprint('node', os.environ['PET_NODE_RANK'])")
    run_job(_launcher(tmp_path, nodes=2, processes=2), job)
    assert job.log_path.read_text() == "node 0\n"
    first, second = fake.pods.values()
    assert b"".join(first.log).decode() == f"the log is {job.log_path}\n" and second.log == [b"node 1\n"]


def test_a_pod_that_cannot_write_the_log_is_heard(tmp_path, fake):
    job = _job(tmp_path)
    launcher = _launcher(tmp_path)
    handle = launcher.submit(job)
    shutil.rmtree(job.log_path.parent)
    launcher.cancel(handle)
    make = fake.make
    fake.make = lambda trainjob: shutil.rmtree(job.log_path.parent) or make(trainjob)
    with pytest.raises(JobFailed, match=r"exit status \d") as caught:
        run_job(launcher, job)
    assert f"{job.log_path}: " in str(caught.value).split("failed first; the end of its log:")[1]


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
    with pytest.raises(JobFailed, match="exit status 9") as caught:
        run_job(_launcher(tmp_path, nodes=2, processes=2), job)
    lines = str(caught.value).splitlines()
    assert lines.index(f"{trainjob_name(job)}-node-0-1-abcde failed first; the end of its log:") < lines.index("node 1")


def test_out_of_memory_is_said(tmp_path, fake):
    job = _job(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(JobFailed, match=r"^pod athanor-train-1-\w+-node-0-0-abcde: OOMKilled") as caught:
        run_job(_launcher(tmp_path), job)
    assert caught.value.exit_status == 137


def test_an_outage_is_no_end_of_the_job(tmp_path, fake):
    code, said = "import time\nprint('ready', flush=True)\ntime.sleep(1)\nprint('done')", []
    launcher = _launcher(tmp_path)
    handle = launcher.submit(_job(tmp_path, code, on_line=said.append))
    _poll_until(launcher, handle, lambda: "ready" in handle.lines)
    fake.outage = True
    _poll_until(launcher, handle, lambda: any("the job goes on" in line for line in said))
    fake.outage = False
    run = time.monotonic() + at_most(120)
    while (status := launcher.poll(handle)) is None and time.monotonic() < run:
        time.sleep(0.02)
    assert status == 0 and handle.job.log_path.read_text().splitlines() == _own_lines(said) == ["ready", "done"]


def test_cancel_gives_time_to_save_and_leaves_nothing(tmp_path, fake):
    launcher, handle = _started(tmp_path)
    launcher.cancel(handle)
    assert (tmp_path / "root" / "train-1" / "job.py.saved").read_text() == "saved"
    assert "saved" in handle.lines
    assert not fake.trainjobs and not fake.pods


def test_pods_of_a_lost_node_are_removed_by_force(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(KubernetesLauncher, "late_seconds", 1.0)
    launcher, handle = _started(tmp_path, stop_grace_seconds=1)
    fake.lost = True
    launcher.cancel(handle)
    assert not fake.pods and not fake.trainjobs and fake.count("DELETE pods/") == 1
    assert [process.wait() for process in fake.killed] == [-signal.SIGKILL]


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
    _started(tmp_path, code)
    seen = []  # the first launcher asks no more, as after a kill -9 of the flow
    run_job(_launcher(tmp_path), _job(tmp_path, code, on_line=seen.append))
    assert _own_lines(seen) == ["begun", "done"] and any("going on with it" in line for line in seen)
    assert fake.count("POST trainjobs") == 1


def test_a_living_job_of_other_settings_is_ended_first(tmp_path, fake):
    _started(tmp_path)
    job = _job(tmp_path, "print('second')")  # same name, other file content
    run_job(_launcher(tmp_path), job)
    assert job.log_path.read_text().splitlines() == ["second"]
    assert (tmp_path / "root" / "train-1" / "job.py.saved").exists()


def test_an_ended_job_makes_room_for_the_next_try(tmp_path, fake):
    for count in (1, 2):
        with pytest.raises(JobFailed, match="exit status 3"):
            run_job(_launcher(tmp_path), _job(tmp_path, "import sys; sys.exit(3)"))
        assert fake.count("POST trainjobs") == count


def test_a_job_that_somebody_deleted(tmp_path, fake):
    launcher, handle = _started(tmp_path)
    launcher.api.delete_trainjob(handle.name)
    with pytest.raises(JobFailed, match="somebody deleted TrainJob"):
        _poll_until(launcher, handle, lambda: False)
    assert not fake.pods


def test_what_a_job_waits_for_is_said_once(tmp_path, fake):
    fake.hold = True
    why = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": "no quota"}
    fake.condition = why
    launcher, said = _launcher(tmp_path), []
    handle = launcher.submit(_job(tmp_path, on_line=said.append))
    _poll_until(launcher, handle, lambda: any("no gpu" in line for line in said))
    calls = fake.count("GET pods")
    _poll_until(launcher, handle, lambda: fake.count("GET pods") > calls + 1)
    assert len([line for line in said if "no gpu" in line]) == 1
    assert len([line for line in said if "no quota" in line]) == 1
    launcher.cancel(handle)


# --- errors that a person can fix


def test_without_the_package_the_manifest_is_there_all_the_same(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(launch_kubernetes, "kubernetes", None)
    missing = r"needs the package kubernetes, which is not installed; pip install -e '.\[kubernetes\]'"
    with pytest.raises(InputError, match=missing) as caught:
        _launcher(tmp_path).submit(_job(tmp_path))
    path = tmp_path / "root" / "train-1" / "trainjob.yaml"
    assert str(caught.value).endswith(f"kubectl apply -f {path}")
    assert yaml.safe_load(path.read_text())["kind"] == "TrainJob"
    assert yaml.safe_load(_launcher(tmp_path).plan(_job(tmp_path)))["kind"] == "TrainJob"
    with pytest.raises(InputError, match=missing):
        check_launcher(_cluster(tmp_path))  # before any stage runs


def test_without_a_kubeconfig_the_file_is_named(tmp_path, fake, monkeypatch):
    path = tmp_path / "none"
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(InputError, match=f"finds no cluster by KUBECONFIG={path}") as caught:
        check_launcher(_cluster(tmp_path))
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


def _recover(fake: FakeCluster) -> None:
    """End the refusals once the first one was answered, which is so when a second request comes."""
    while fake.count("POST") < 2:
        time.sleep(0.01)
    fake.refusal = None


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_cluster_that_cannot_now_is_asked_again(tmp_path, fake, status):
    fake.refusal = (status, "etcdserver: leader changed")
    threading.Thread(target=_recover, args=(fake,)).start()
    said = []
    run_job(_launcher(tmp_path), _job(tmp_path, "print('here')", on_line=said.append))
    assert any("leader changed" in line and line.endswith("trying again") for line in said) and "here" in said


def test_a_cluster_that_does_not_answer_at_submit_is_asked_again_for_a_while(tmp_path, fake, monkeypatch):
    fake.outage, said = True, []
    monkeypatch.setattr("stages.shared.launchers.scheduled.SUBMIT_SECONDS", 2)
    with pytest.raises(InputError, match="the API server does not answer"):
        _launcher(tmp_path).submit(_job(tmp_path, on_line=said.append))
    assert said[0].endswith("trying again")


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
    launcher = _launcher(tmp_path, nodes=2, processes=2, stop_grace_seconds=120)
    job = Job(str(run.output_dir), ("-m", "trainer", str(run.output_dir / "run.json")), run.output_dir / "logs" / "log")
    handle = launcher.submit(job)
    _poll_until(launcher, handle, lambda: len(metrics_of(run)) >= 2)
    launcher.cancel(handle)
    assert result_of(run).status == "stopped" and result_of(run).checkpoint
    fake.port = _free_port()
    run_job(launcher, job)
    assert result_of(run).status == "finished" and [row.step for row in metrics_of(run)] == list(range(1, 61))
    assert (job.log_path.parent / "rank-0001.log").is_file()
