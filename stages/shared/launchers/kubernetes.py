"""The launcher for Kubernetes: a TrainJob of Kubeflow's Trainer, created and watched through the API server.

The first pod writes the job's log into the root. The job's name comes from the work, and an annotation has a digest of
its content, by which the next try of the same work can tell whether a living job is the same. A TrainJob is never
restarted; a new run resumes from the checkpoint.

The TrainJob is the user's own, execution.cluster.job_file, with the name, the command, the size and the times of this
job. Format: trainer.kubeflow.org/v1alpha1 as of Trainer 2.3. Its torch plugin sets the variables PET_NNODES,
PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT in the container named `node`. torchrun reads
them as its options, so the command names none of them. Settings that a TrainJob cannot have (restarts, for example) are
in its runtime, infra/kubernetes/runtime.yaml.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
import yaml
from pydantic import ValidationError

from dataset_builders.errors import InputError, one_line, shown
from dataset_builders.storage.files import GrowingFile, write_text
from dataset_builders.storage.store import is_local
from stages.shared.launchers.config import JOB_FILES, ClusterConfig
from stages.shared.launchers.job import (
    EXIT_DEADLINE,
    TAIL_LINES,
    Job,
    JobFailed,
    as_rank,
    rank_environment,
    read_job_file,
    timed_out,
)
from stages.shared.launchers.scheduled import ClusterError, ScheduledHandle, ScheduledLauncher
from trainer.contract.run import parse_run

try:
    import kubernetes
except ImportError:  # a plan shows the manifest without this package
    kubernetes = None

TRAINJOB_YAML = "trainjob.yaml"
EXIT_DELETED = 143
REQUEST_SECONDS = 20
_POD_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
_TRAINJOBS = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs"}
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # to be retried; 409: changed by somebody else
API_VERSION = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"  # the trainer's container, and its job in the JobSet
OWN = "athanor/"  # prefix of our annotations
CONTENT = f"{OWN}content"  # annotation: digest of the content, which identifies a live job
MANAGED_BY = {"app.kubernetes.io/managed-by": "athanor"}
LEFTOVER_SECONDS = 10  # for torchrun to end, after the workers have saved
LIMITS = "spec.trainer.resourcesPerNode.limits"
POD = "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[node].template.spec.template.spec"
MOUNTS = f"{POD}.containers[node].volumeMounts"
# $0 is the job's log, which the first node writes; the other arguments are torchrun's command.
_ON_NODE = """\
if [ "$PET_NODE_RANK" = 0 ]; then echo "the log is $0"; exec "$@" >>"$0" 2>&1; fi
exec "$@\""""
_GPU = re.compile(r"/gpu$|gpu\.|/mig-")  # nvidia.com/gpu, amd.com/gpu, gpu.intel.com/xe, nvidia.com/mig-1g.10gb


@dataclass(slots=True, kw_only=True)
class KubernetesHandle(ScheduledHandle):
    """A TrainJob, with its name, its manifest and the time when it was made."""

    name: str
    manifest: Mapping[str, Any]
    made_at: float = 0.0


class KubernetesLauncher(ScheduledLauncher):
    """The launcher of TrainJobs."""

    unreachable = "{error}; the manifest is {command}"
    late_seconds = LEFTOVER_SECONDS + 30.0

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__(cluster)
        self.api = Cluster(read_trainjob(cluster)["metadata"]["namespace"])

    def check(self) -> None:
        """Check that the package `kubernetes` and a kubeconfig exist.

        Raises:
            InputError: one of them is missing.
        """
        self.api.connect()

    def plan(self, job: Job) -> str:
        """Return the manifest of `submit`, as YAML; needs no cluster."""
        return render_trainjob(make_trainjob(self.cluster, job))

    def _prepare(self, job: Job) -> KubernetesHandle:
        manifest = make_trainjob(self.cluster, job)
        name, path = manifest["metadata"]["name"], job.run_json.parent / TRAINJOB_YAML
        write_text(path, render_trainjob(manifest))
        try:
            self.check()
        except InputError as error:
            raise InputError(f"{error}; or by hand: kubectl apply -f {path}") from error
        return KubernetesHandle(
            job=job,
            command=["kubectl", "apply", "-f", str(path)],
            log=GrowingFile(job.log_path),
            title=f"TrainJob {name}",
            by_hand=f"kubectl delete trainjob {name} -n {self.api.namespace}",
            name=name,
            manifest=manifest,
        )

    def _attach_or_make(self, handle: KubernetesHandle) -> None:
        trainjob, content = self.api.trainjob(handle.name), handle.manifest["metadata"]["annotations"][CONTENT]
        if trainjob is not None:
            if _lives(trainjob) and trainjob["metadata"].get("annotations", {}).get(CONTENT) == content:
                made = datetime.fromisoformat(trainjob["metadata"]["creationTimestamp"])
                handle.made_at = time.monotonic() - max(0.0, (datetime.now(UTC) - made).total_seconds())
                self._say(handle, f"{handle.title} lives; going on with it")
                return
            self.cancel(handle)  # it has ended, or has other settings
        self._clear(handle)
        self.api.make_trainjob(handle.manifest)
        handle.made_at = time.monotonic()
        self._say(handle, f"{handle.title} made in namespace {self.api.namespace}")

    def _look(self, handle: KubernetesHandle) -> None:
        trainjob = self.api.trainjob(handle.name)
        if trainjob is None or "deletionTimestamp" in trainjob["metadata"]:
            self.cancel(handle)
            raise JobFailed(f"somebody deleted {handle.title}", handle, EXIT_DELETED)
        handle.ran_seconds = time.monotonic() - handle.made_at
        pods = self.api.pods(handle.name)
        if _lives(trainjob):
            if waits := _waits(trainjob, pods):
                self._say(handle, "; ".join(waits))
        elif _condition(trainjob, "Complete"):
            handle.status = 0
        else:
            self._fail(handle, _condition(trainjob, "Failed"), pods)

    def _fail(self, handle: KubernetesHandle, why: Mapping[str, Any], pods: list[Any]) -> None:
        """Set the exit status of a failed job, and pass on how its pods ended."""
        handle.pass_on_new(handle.log)
        ends = [(pod, state.terminated) for pod in pods for state in _states(pod)]
        failed = [(pod, end) for pod, end in ends if end and end.exit_code]
        # In order of time; an end without a time comes first.
        failed.sort(key=lambda item: (item[1].finished_at is not None, item[1].finished_at))
        text = []
        if failed and not (_writes_log(failed[0][0]) and handle.lines):  # what that pod printed is in no file
            name = failed[0][0].metadata.name
            try:
                lines = self.api.last_lines(name, CONTAINER, TAIL_LINES)
            except ClusterError as error:
                if error.is_passing:
                    raise
                lines = [str(error)]
            text = [f"{name} failed first; the end of its log:", *lines]
        evicted = [pod for pod in pods if pod.status.reason]
        text += [f"{pod.metadata.name} ended: {end.reason or 'Error'}, status {end.exit_code}" for pod, end in failed]
        text += [f"{pod.metadata.name}: {pod.status.reason} {pod.status.message or ''}" for pod in evicted]
        handle.pass_on([*text, f"{handle.title} failed: {why.get('message', '')}"])
        # Reasons that exit statuses do not show, such as OOMKilled and Evicted.
        reasons = [(pod, end.reason) for pod, end in failed if end.reason not in (None, "Error")]
        reasons += [(pod, pod.status.reason) for pod in evicted]
        handle.why = "; ".join(f"pod {pod.metadata.name}: {reason}" for pod, reason in reasons)
        handle.status = failed[0][1].exit_code if failed else 1
        if why.get("reason") == "DeadlineExceeded":
            handle.status = EXIT_DEADLINE
            raise timed_out(self.cluster, handle)

    def _end(self, handle: KubernetesHandle, is_late: bool) -> None:
        """Delete the TrainJob: SIGTERM, time to save, SIGKILL; late, also the pods of a node that does not answer."""
        if not handle.is_told:
            self.api.delete_trainjob(handle.name)
            handle.is_told = True
        if self.api.trainjob(handle.name) is None and not self.api.pods(handle.name):
            handle.status = EXIT_DELETED
        elif is_late and not handle.is_killed:
            self.api.kill_pods(handle.name)
            handle.is_killed = True


def _condition(trainjob: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of a kind (Complete, Failed, Suspended); empty unless its status is True."""
    conditions = trainjob.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), {})


def _lives(trainjob: Mapping[str, Any]) -> bool:
    """Whether the TrainJob waits or runs, and nobody has deleted it."""
    ended = _condition(trainjob, "Complete") or _condition(trainjob, "Failed")
    return not ended and "deletionTimestamp" not in trainjob["metadata"]


def _states(pod: Any) -> list[Any]:
    return [s.state for s in pod.status.container_statuses or [] if s.name == CONTAINER and s.state]


def _writes_log(pod: Any) -> bool:
    """Whether this is the pod of rank 0, which writes the job's log."""
    names = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    return names.get("batch.kubernetes.io/job-completion-index") == "0"


def _waits(trainjob: Mapping[str, Any], pods: list[Any]) -> list[str]:
    """Return the reasons why the job does not start, in words: no free node, no image, suspended by a queue."""
    suspended = _condition(trainjob, "Suspended")
    reasons = [f"suspended: {suspended.get('message', '')}"] if suspended else []
    for pod in pods:
        held = [c for c in pod.status.conditions or [] if c.type == "PodScheduled" and c.status == "False"]
        held += [state.waiting for state in _states(pod) if state.waiting]
        reasons += [f"{pod.metadata.name} waits: {why.reason or ''} {why.message or ''}" for why in held]
    return reasons


class Cluster:
    """Client of one namespace of a cluster. Its methods raise ClusterError, and InputError if `connect` does."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._request = {"namespace": namespace, "_request_timeout": REQUEST_SECONDS}
        self._trainjobs = {**_TRAINJOBS, **self._request}
        self._client: Any = None

    def connect(self) -> Any:
        """Return the client of the API server, without sending a request: that of the kubeconfig, or in a pod of the
        service account, unless a kubeconfig is named.

        Raises:
            InputError: the package `kubernetes` is not installed, or no configuration names a cluster.
        """
        if kubernetes is None:
            raise InputError(
                "launcher=kubernetes needs the package kubernetes, which is not installed; "
                "pip install -e '.[kubernetes]'"
            )
        if self._client is not None:
            return self._client
        path = os.environ.get("KUBECONFIG")  # the package reads this variable only once, at its import
        configuration, config = kubernetes.client.Configuration(), kubernetes.config
        try:
            if path or not os.path.exists(_POD_TOKEN):
                config.load_kube_config(path, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException as error:
            raise InputError(
                f"launcher=kubernetes finds no cluster by KUBECONFIG={path or '~/.kube/config'}: {error}"
            ) from error
        configuration.retries = False  # the launcher retries, and logs it
        self._client = kubernetes.client.ApiClient(configuration)
        return self._client

    def make_trainjob(self, manifest: Mapping[str, Any]) -> None:
        """Create the TrainJob; the cluster refuses unknown fields."""
        with self._api("CustomObjectsApi", "make the TrainJob") as api:
            api.create_namespaced_custom_object(
                body=manifest, field_validation="Strict", field_manager="athanor", **self._trainjobs
            )

    def trainjob(self, name: str) -> dict[str, Any] | None:
        """Return the TrainJob from the cluster; None if there is none."""
        with self._api("CustomObjectsApi", f"read TrainJob {name}") as api:
            try:
                return api.get_namespaced_custom_object(name=name, **self._trainjobs)
            except kubernetes.client.exceptions.NotFoundException:
                return None

    def delete_trainjob(self, name: str) -> None:
        """Delete the TrainJob: SIGTERM to the pods, their grace period, SIGKILL. It exists until its pods are gone."""
        with (
            self._api("CustomObjectsApi", f"delete TrainJob {name}") as api,
            contextlib.suppress(kubernetes.client.exceptions.NotFoundException),
        ):
            api.delete_namespaced_custom_object(name=name, propagation_policy="Foreground", **self._trainjobs)

    def pods(self, name: str) -> list[Any]:
        """Return the pods of a TrainJob (V1Pod); its JobSet has the same name."""
        with self._api("CoreV1Api", f"list the pods of {name}") as api:
            selector = f"jobset.sigs.k8s.io/jobset-name={name}"
            return api.list_namespaced_pod(label_selector=selector, **self._request).items

    def kill_pods(self, name: str) -> None:
        """Delete the pods without a grace period."""
        pods = self.pods(name)
        with self._api("CoreV1Api", f"kill the pods of {name}") as api:
            for pod in pods:
                api.delete_namespaced_pod(pod.metadata.name, grace_period_seconds=0, **self._request)

    def last_lines(self, pod: str, container: str, count: int) -> list[str]:
        """Return the last lines of a container's log."""
        with self._api("CoreV1Api", f"read the log of {pod}") as api:
            answer = api.read_namespaced_pod_log(
                pod, container=container, tail_lines=count, _preload_content=False, **self._request
            )
            return answer.data.decode(errors="replace").splitlines()

    @contextlib.contextmanager
    def _api(self, kind: str, what: str) -> Iterator[Any]:
        """Give an API of the package; convert its errors to ClusterErrors that name the attempted action."""
        client = self.connect()
        try:
            yield getattr(kubernetes.client, kind)(client)
        except kubernetes.client.ApiException as error:
            raise ClusterError(f"cannot {what}: {_reason(error)}", error.status in _PASSING) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterError(f"cannot {what}: the API server does not answer ({error})", True) from error


def _reason(error: Any) -> str:
    """Return the API server's message, in one line."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    if error.status == 404 and body.startswith("404 page"):
        return "the cluster knows no TrainJob of trainer.kubeflow.org/v1alpha1; install Kubeflow Trainer there"
    try:
        text = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        text = body or str(error.reason)
    return f"{' '.join(text.split())} (status {error.status})"


def trainjob_name(job: Job) -> str:
    """Return a name that is the same for every try of the same work: athanor-<what>-<12 hex digits>."""
    digest = hashlib.sha256(job.name.encode()).hexdigest()[:12]
    what = re.sub(r"[^a-z0-9]+", "-", Path(job.name).name.lower()).strip("-")[:24].strip("-")
    return "-".join(part for part in ("athanor", what, digest) if part)


def make_trainjob(cluster: ClusterConfig, job: Job) -> dict[str, Any]:
    """Return the manifest. It contains names of secrets, never their values.

    Raises:
        InputError: the job file cannot be used (see `read_trainjob`), or the pods would not see a path of the run.
    """
    manifest = read_trainjob(cluster)
    _check_paths(cluster, manifest, job)
    _put(cluster, manifest, "metadata", {"name": trainjob_name(job)})
    rank = as_rank(job.log_path.parent, ["python", *job.arguments])
    words = ["/bin/sh", "-c", _ON_NODE, str(job.log_path), "torchrun", "--max-restarts=0", "--no-python", *rank]
    # Kubernetes would read `$(NAME)` as a variable, and `$$` as `$`.
    command = [word.replace("$$", "$$$$").replace("$(", "$$(") for word in words]
    _put(cluster, manifest, "spec.trainer", {"command": command})
    metadata, trainer = manifest["metadata"], manifest["spec"]["trainer"]
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **rank_environment(cluster, job.name)}
    cpus = str(_part(cluster, manifest, LIMITS).get("cpu", ""))
    if threads := cluster.num_threads or (int(cpus) // cluster.per_node if cpus.isdigit() else 0):
        variables["OMP_NUM_THREADS"] = str(threads)
    theirs = trainer.get("env") or []
    names = {entry.get("name") for entry in theirs}  # a variable that the file sets itself stays as it is
    trainer["env"] = [{"name": n, "value": value} for n, value in variables.items() if n not in names] + theirs
    metadata["labels"] = {**(metadata.get("labels") or {}), **MANAGED_BY}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), f"{OWN}directory": job.name}
    content = hashlib.sha256(render_trainjob(manifest).encode())  # of all but this annotation itself
    content.update(job.run_json.read_bytes() if job.run_json.is_file() else b"")
    metadata["annotations"][CONTENT] = content.hexdigest()[:16]
    return manifest


def read_trainjob(cluster: ClusterConfig) -> dict[str, Any]:
    """Read the user's TrainJob, check that it fits the run, and set the run's size and times in it.

    Raises:
        InputError: the file is not a TrainJob, or a part of it is missing or contradicts the run; the text names it.
    """
    file, need = cluster.job_file, cluster.per_node
    try:
        manifest = yaml.safe_load(read_job_file(cluster))
    except yaml.YAMLError as error:
        raise InputError(f"{file} is not YAML: {one_line(error)}") from error
    for path in ("metadata.namespace", "spec.runtimeRef.name", "spec.trainer.image", MOUNTS):
        _part(cluster, manifest, path)
    _put(cluster, manifest, "", {"apiVersion": API_VERSION, "kind": "TrainJob"})
    _put(cluster, manifest, "spec", {"activeDeadlineSeconds": math.ceil(cluster.timeout_seconds)})
    _put(cluster, manifest, "spec.trainer", {"numNodes": cluster.nodes, "numProcPerNode": need})
    grace = math.ceil(cluster.stop_grace_seconds) + LEFTOVER_SECONDS
    _put(cluster, manifest, POD, {"terminationGracePeriodSeconds": grace})
    limits = _part(cluster, manifest, LIMITS)
    gpus = [int(number) for name, number in limits.items() if _GPU.search(name) and str(number).isdigit()]
    if not gpus or 0 < sum(gpus) < need:
        raise InputError(
            f"{file}: {LIMITS} gives a node {sum(gpus) or 'no'} GPUs, but execution.cluster.processes="
            f"{cluster.processes} on nodes={cluster.nodes} need {need}; write nvidia.com/gpu: {need}, or 0 on CPU"
        )
    return manifest


def render_trainjob(manifest: dict[str, Any]) -> str:
    """Return the manifest as YAML; the same manifest gives the same text."""
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def _part(cluster: ClusterConfig, manifest: Any, path: str) -> Any:
    """Return a part of a manifest. `a.b[node]` is the entry of the list b that is called node."""
    part = manifest
    for key, entry in re.findall(r"(\w+)(?:\[(\w+)\])?", path):
        part = part.get(key) if isinstance(part, dict) else None
        if entry:
            named = enumerate(part if isinstance(part, list) else [])
            part = next((each for i, each in named if entry == str(i) or each == {**each, "name": entry}), None)
    if part is None:
        raise InputError(f"{cluster.job_file}: {path} is missing; the file is {JOB_FILES['kubernetes']}")
    return part


def _put(cluster: ClusterConfig, manifest: dict[str, Any], path: str, values: dict[str, Any]) -> None:
    """Set values that athanor decides. Another value in the file is refused."""
    part = _part(cluster, manifest, path)
    for key, value in values.items():
        if part.setdefault(key, value) != value:
            raise InputError(
                f"{cluster.job_file}: {path or 'the file'} has {key}={shown(part[key])}, but this run needs "
                f"{shown(value)}; remove it from the file, or change execution.cluster"
            )


def _check_paths(cluster: ClusterConfig, manifest: dict[str, Any], job: Job) -> None:
    """Check that the pods see every path of the run in a volume that outlives them, at the same path."""
    paths = {"run.json": job.run_json}  # which may not be written yet
    if job.run_json.is_file():
        with contextlib.suppress(ValidationError):  # a job of another kind
            run = parse_run(job.run_json.read_text(encoding="utf-8"))
            directories = {name: getattr(run, name) for name in type(run).model_fields if name.endswith("_dir")}
            paths |= {name: path for name, path in directories.items() if path is not None and is_local(path)}
    volumes, mounts = _part(cluster, manifest, f"{POD}.volumes"), _part(cluster, manifest, MOUNTS)
    lost = {volume.get("name") for volume in volumes if "emptyDir" in volume}
    kept = [mount["mountPath"] for mount in mounts if mount.get("name") not in lost and "mountPath" in mount]
    for name, path in paths.items():
        if not any(path.is_relative_to(mount) for mount in kept):
            raise InputError(
                f"{name}={path} lies outside of the volumes that {cluster.job_file} mounts ({', '.join(kept)}), and "
                "pods see nothing else; put it there (--root), or mount its volume at the same path"
            )
