"""The launcher for Kubernetes: a TrainJob of Kubeflow's Trainer, created and watched through the API server.

The first pod writes the job's log into the root. The job's name comes from the work, and an annotation has a digest of
its content, by which the next try of the same work can tell whether a living job is the same. A TrainJob is never
restarted; a new run resumes from the checkpoint.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3

from dataset_builders.errors import InputError
from dataset_builders.storage.files import GrowingFile, write_text
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import EXIT_DEADLINE, TAIL_LINES, Job, JobFailed, timed_out
from stages.shared.launchers.kubernetes.trainjob import (
    CONTAINER,
    CONTENT,
    LEFTOVER_SECONDS,
    make_trainjob,
    read_trainjob,
    render_trainjob,
)
from stages.shared.launchers.scheduled import ClusterError, ScheduledHandle, ScheduledLauncher

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
        name, path = manifest["metadata"]["name"], Path(job.arguments[-1]).parent / TRAINJOB_YAML
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
        failed, text = _failures(pods), []
        if failed and (not _is_first(failed[0][0]) or not handle.lines):  # what that pod printed is in no file
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


def _is_first(pod: Any) -> bool:
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


def _failures(pods: list[Any]) -> list[tuple[Any, Any]]:
    """Return (pod, V1ContainerStateTerminated of its container) of each failed pod, in order of time."""
    ends = [(pod, state.terminated) for pod in pods for state in _states(pod)]
    failed = [(pod, end) for pod, end in ends if end and end.exit_code]
    return sorted(failed, key=lambda item: (item[1].finished_at is not None, item[1].finished_at))


class Cluster:
    """Client of one namespace of a cluster. Its methods raise ClusterError, and InputError if `connect` does."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
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
                body=manifest, field_validation="Strict", field_manager="athanor", **self._trainjobs()
            )

    def trainjob(self, name: str) -> dict[str, Any] | None:
        """Return the TrainJob from the cluster; None if there is none."""
        with self._api("CustomObjectsApi", f"read TrainJob {name}") as api:
            try:
                return api.get_namespaced_custom_object(name=name, **self._trainjobs())
            except kubernetes.client.exceptions.NotFoundException:
                return None

    def delete_trainjob(self, name: str) -> None:
        """Delete the TrainJob: SIGTERM to the pods, their grace period, SIGKILL. It exists until its pods are gone."""
        with (
            self._api("CustomObjectsApi", f"delete TrainJob {name}") as api,
            contextlib.suppress(kubernetes.client.exceptions.NotFoundException),
        ):
            api.delete_namespaced_custom_object(name=name, propagation_policy="Foreground", **self._trainjobs())

    def pods(self, name: str) -> list[Any]:
        """Return the pods of a TrainJob (V1Pod); its JobSet has the same name."""
        with self._api("CoreV1Api", f"list the pods of {name}") as api:
            selector = f"jobset.sigs.k8s.io/jobset-name={name}"
            return api.list_namespaced_pod(label_selector=selector, **self._request()).items

    def kill_pods(self, name: str) -> None:
        """Delete the pods without a grace period."""
        pods = self.pods(name)
        with self._api("CoreV1Api", f"kill the pods of {name}") as api:
            for pod in pods:
                api.delete_namespaced_pod(pod.metadata.name, grace_period_seconds=0, **self._request())

    def last_lines(self, pod: str, container: str, count: int) -> list[str]:
        """Return the last lines of a container's log."""
        with self._api("CoreV1Api", f"read the log of {pod}") as api:
            answer = api.read_namespaced_pod_log(
                pod, container=container, tail_lines=count, _preload_content=False, **self._request()
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

    def _request(self) -> dict[str, Any]:
        return {"namespace": self.namespace, "_request_timeout": REQUEST_SECONDS}

    def _trainjobs(self) -> dict[str, Any]:
        return {**_TRAINJOBS, **self._request()}


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
