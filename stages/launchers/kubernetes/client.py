"""Access to TrainJobs, pods and logs of one namespace, through the package `kubernetes` (extra `kubernetes`)."""

import contextlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import urllib3

from dataset_builders.errors import InputError

try:
    import kubernetes
except ImportError:  # a plan shows the manifest without this package
    kubernetes = None

REQUEST_SECONDS = 20
SILENT_SECONDS = 300  # seconds without a line after which a log is requested again: its connection may be broken
_MOST_READINGS = 10  # most readings of the log of an ended container
_TRAINJOBS = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs"}
_FRACTION = re.compile(r"\.\d+")  # fraction of a second
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # to be retried; 409: changed by somebody else


class ClusterError(RuntimeError):
    """The API server refused a request or did not answer.

    Attributes:
        is_passing: whether another try may help.
    """

    def __init__(self, text: str, is_passing: bool) -> None:
        super().__init__(text)
        self.is_passing = is_passing


class Cluster:
    """Client of one namespace of a cluster. Its methods raise ClusterError, and InputError if `connect` does."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._client: Any = None

    def connect(self) -> Any:
        """Return the client of the API server, without sending a request.

        Raises:
            InputError: the package `kubernetes` is not installed, or no configuration names a cluster.
        """
        if kubernetes is None:
            raise InputError(
                "launcher=kubernetes needs the package kubernetes, which is not installed; "
                "pip install -e '.[kubernetes]'"
            )
        if self._client is None:
            configuration = self._load()
            configuration.retries = False  # the launcher retries, and logs it
            self._client = kubernetes.client.ApiClient(configuration)
        return self._client

    def _load(self) -> Any:
        """Return the kubeconfig's configuration; in a pod, the service account's, unless a kubeconfig is named."""
        configuration = kubernetes.client.Configuration()
        path = os.environ.get("KUBECONFIG")  # the package reads this variable only once, at its import
        if not path:
            with contextlib.suppress(kubernetes.config.ConfigException):  # not in a pod
                kubernetes.config.load_incluster_config(client_configuration=configuration)
                return configuration
        try:
            kubernetes.config.load_kube_config(path, client_configuration=configuration)
        except kubernetes.config.ConfigException as error:
            raise InputError(
                f"launcher=kubernetes finds no cluster by KUBECONFIG={path or '~/.kube/config'}: {error}"
            ) from error
        return configuration

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

    def follow_log(self, pod: str, container: str, since: str | None) -> Any:
        """Return a response that yields a container's log up to the container's end: lines of bytes, each with its
        timestamp.

        Args:
            since: timestamp of the first line, RFC 3339, to the second; None: from the beginning.
        """
        query = [("container", container), ("follow", "true"), ("timestamps", "true")]
        if since:
            query.append(("sinceTime", since))  # read_namespaced_pod_log does not support this parameter
        with self._api("CoreV1Api", f"follow the log of {pod}") as api:
            return api.api_client.call_api(
                "/api/v1/namespaces/{namespace}/pods/{pod}/log",
                "GET",
                {"namespace": self.namespace, "pod": pod},
                query,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=(REQUEST_SECONDS, SILENT_SECONDS),
            )

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


class LogFollower:
    """Reader of one container's log; returns each line once, however often the connection breaks.

    A thread reads the log. After a stream ends, the log is requested again from the second of the newest line (the
    server has no finer resolution), and the lines of that second that were already read are skipped.

    Args:
        follow: `Cluster.follow_log` of the container; called with the start time, or None.
        wait_seconds: time between the end of a stream and the next request.
    """

    def __init__(self, follow: Callable[[str | None], Iterable[bytes]], wait_seconds: float) -> None:
        self._open, self._wait_seconds = follow, wait_seconds
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_ended, self._is_closed = threading.Event(), threading.Event()
        self._stream: Any = None
        self._second, self._count = "", 0  # second of the newest line; number of lines read in this second
        self._thread = threading.Thread(target=self._follow, name="log of a pod", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """Return the lines read since the last call."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def rest(self, seconds: float) -> list[str]:
        """Return the last lines of a container that has ended or is gone; wait at most `seconds` for them."""
        self._is_ended.set()
        self._thread.join(seconds)
        self.close()
        return self.lines()

    def close(self) -> None:
        """Stop reading."""
        self._is_closed.set()
        self._is_ended.set()
        with contextlib.suppress(AttributeError, ValueError, RuntimeError, OSError):  # not started, or already ended
            self._stream.shutdown()

    def _follow(self) -> None:
        """Read until closed, or until the container has ended and two readings find no new line.

        A broken stream looks like an ended one, so one reading is not enough.
        """
        idle, after_end = 0, 0
        while idle < 2 and after_end < _MOST_READINGS and not self._is_closed.is_set():
            was_ended = self._is_ended.is_set()
            has_new = self._read()
            if was_ended:
                after_end += 1
                idle = 0 if has_new else idle + 1
            else:
                self._is_ended.wait(self._wait_seconds)

    def _read(self) -> bool:
        """Read one stream to its end; return whether it had a new line or ended within a line."""
        has_new, to_pass = False, self._count
        with contextlib.suppress(ClusterError, urllib3.exceptions.HTTPError, OSError):
            self._stream = self._open(self._second or None)
            for line in self._stream:
                if self._is_closed.is_set() or not line.endswith(b"\n"):
                    return True
                if to_pass:
                    to_pass -= 1
                    continue
                stamp, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
                second = _FRACTION.sub("", stamp)
                if second > self._second:
                    self._second, self._count = second, 0
                self._count += second == self._second
                self._lines.put(text)
                has_new = True
        return has_new
