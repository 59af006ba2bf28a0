"""A fake Kubernetes API server with the cluster behind it. A pod is a process of this machine.

It supports the requests of the launcher, as Kubernetes and Kubeflow's Trainer 2.3 do: TrainJobs (create, get, delete in
the foreground), pods (list by label, kill), and the end of a pod's log. It sets the labels of JobSet's pods and the
PET_* variables of the torch plugin. A pod ends by SIGTERM to its first process, and by SIGKILL
after its grace period.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import yaml


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "000Z")


def pod_spec_of(trainjob: dict) -> dict:
    """Return the pod's spec in the patch of a TrainJob's runtime."""
    patches = trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
    return patches["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


class Pod:
    """A pod: its process, its state and its log. `process` is None while the pod has no node."""

    def __init__(self, cluster: "FakeCluster", trainjob: dict, node: int) -> None:
        self.job, self.node = trainjob["metadata"]["name"], node
        self.name = f"{self.job}-node-0-{node}-abcde"
        self.grace = pod_spec_of(trainjob)["terminationGracePeriodSeconds"]
        self.log: list[bytes] = []
        self.state: dict = {"waiting": {"reason": "ContainerCreating"}}
        self.process: subprocess.Popen | None = None
        if not cluster.hold:
            self._start(cluster, trainjob)

    def _start(self, cluster: "FakeCluster", trainjob: dict) -> None:
        command = [word.replace("$$", "$") for word in trainjob["spec"]["trainer"]["command"]]  # as in `$$(`
        if cluster.command:  # behind the shell that opens the log
            command = [*command[:4], *cluster.command, command[-1]]
        self.process = subprocess.Popen(
            command,
            env=_environment(cluster, trainjob, self.node),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.state = {"running": {"startedAt": now()}}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.log.append(line.rstrip(b"\n") + b"\n")
        status = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = status if status >= 0 else 128 - status
        reason = "OOMKilled" if code == 137 else "Error" if code else "Completed"
        self.state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}

    def kill(self) -> None:
        """Send SIGKILL to all processes of the pod. On a busy machine they end some time later."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        return self.process is None or "terminated" in self.state

    def end(self) -> None:
        """End the pod: SIGTERM, the grace period, SIGKILL."""
        if not self.is_over:
            self.process.terminate()
            timer = threading.Timer(self.grace, self.process.kill)
            timer.daemon = True
            timer.start()


def _environment(cluster: "FakeCluster", trainjob: dict, node: int) -> dict[str, str]:
    trainer = trainjob["spec"]["trainer"]
    values = {variable["name"]: variable["value"] for variable in trainer["env"] if "value" in variable}
    return {
        **os.environ,
        **values,
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(cluster.port),
    }


@dataclass
class FakeCluster:
    """The cluster's objects, and settings of the server's behaviour.

    Attributes:
        calls: method and path of every request.
        command: command that runs in place of `torchrun ... -m trainer`, with the last argument of the TrainJob.
        port: port of the rendezvous of a job's ranks.
        outage: whether connections are closed without an answer.
        refusal: (status, message), the answer to a new TrainJob.
        hold: whether pods stay without a node.
        condition: one more condition of every TrainJob.
        lost: whether pods are never told to end, because their node does not answer.
        killed: processes of the pods that were removed by force; they may not have ended yet.
    """

    calls: list[str] = field(default_factory=list)
    trainjobs: dict[str, dict] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    port: int = 29500
    outage: bool = False
    refusal: tuple[int, str] | None = None
    hold: bool = False
    condition: dict | None = None
    lost: bool = False
    killed: list[subprocess.Popen] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def count(self, text: str) -> int:
        """Return the number of requests so far that start with a text."""
        return sum(call.startswith(text) for call in self.calls)

    def pods_of(self, name: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.job == name]

    def make(self, trainjob: dict) -> dict:
        name = trainjob["metadata"]["name"]
        trainjob["metadata"]["creationTimestamp"] = now()[:19] + "Z"
        self.trainjobs[name] = trainjob
        for node in range(trainjob["spec"]["trainer"]["numNodes"]):
            pod = Pod(self, trainjob, node)
            self.pods[pod.name] = pod
        return trainjob

    def look(self, name: str) -> dict | None:
        """Return the TrainJob with its status. Pods of a deleted TrainJob that have ended are removed."""
        trainjob = self.trainjobs.get(name)
        if trainjob is None:
            return None
        pods = self.pods_of(name)
        if "deletionTimestamp" in trainjob["metadata"]:
            for pod in pods:
                if pod.is_over:
                    del self.pods[pod.name]
            if not self.pods_of(name):
                return self.trainjobs.pop(name) and None
        conditions = [self.condition] if self.condition else []
        ends = [pod.state.get("terminated") for pod in pods]
        if any(end and end["exitCode"] for end in ends):
            conditions.append({"type": "Failed", "status": "True", "reason": "JobsFailed", "message": "jobset failed"})
            for pod in pods:
                pod.end()
        elif ends and all(ends):
            conditions.append({"type": "Complete", "status": "True", "reason": "JobsCompleted", "message": "all done"})
        return {**trainjob, "status": {"conditions": conditions}}

    def delete(self, name: str) -> None:
        self.trainjobs[name]["metadata"]["deletionTimestamp"] = now()
        for pod in self.pods_of(name) if not self.lost else ():
            pod.end()
        self.look(name)

    def kill(self, name: str) -> None:
        pod = self.pods.pop(name)
        if pod.process:
            pod.kill()
            self.killed.append(pod.process)

    def describe(self, pod: Pod) -> dict:
        labels = {"jobset.sigs.k8s.io/jobset-name": pod.job, "batch.kubernetes.io/job-completion-index": str(pod.node)}
        status = {"name": "node", "image": "i", "imageID": "", "ready": True, "restartCount": 0, "state": pod.state}
        why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}
        about = {"conditions": [why]} if pod.process is None else {"containerStatuses": [status]}
        return {"metadata": {"name": pod.name, "labels": labels}, "status": about}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def cluster(self) -> FakeCluster:
        return self.server.cluster

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None: ...

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        kind, *rest = url.path.rpartition("/namespaces/")[2].split("/")[1:]
        self.cluster.calls.append(f"{self.command} {kind}{'/' if rest else ''}{'/'.join(rest)} {url.query}".strip())
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.cluster.outage:
            self.close_connection = True
            return
        if rest[1:] == ["log"]:
            self._send_log(rest[0], query)
            return
        with self.cluster.lock:
            if kind == "trainjobs":
                self._trainjobs(rest, body, query)
            elif self.command == "DELETE":
                assert query["gracePeriodSeconds"] == "0"
                self.cluster.kill(rest[0])
                self._answer(200, {})
            else:
                pods = self.cluster.pods_of(query["labelSelector"].partition("=")[2])
                self._answer(200, {"items": [self.cluster.describe(pod) for pod in pods]})

    def _trainjobs(self, rest: list[str], body: dict, query: dict[str, str]) -> None:
        cluster = self.cluster
        if self.command == "POST" and cluster.refusal:
            self._refuse(*cluster.refusal)
        elif self.command == "POST" and body["metadata"]["name"] in cluster.trainjobs:
            self._refuse(409, f'trainjobs.trainer.kubeflow.org "{body["metadata"]["name"]}" already exists')
        elif self.command == "POST":
            assert query["fieldValidation"] == "Strict"
            self._answer(201, cluster.make(body))
        elif (trainjob := cluster.look(rest[0])) is None:
            self._refuse(404, f'trainjobs.trainer.kubeflow.org "{rest[0]}" not found')
        elif self.command == "DELETE":
            assert query["propagationPolicy"] == "Foreground"  # otherwise its pods would outlive it
            cluster.delete(rest[0])
            self._answer(200, trainjob)
        else:
            self._answer(200, trainjob)

    def _answer(self, status: int, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str) -> None:
        is_page = message.startswith("404 page")  # the answer to an unknown path is not a Status object
        self._answer(status, message.encode() if is_page else {"kind": "Status", "code": status, "message": message})

    def _send_log(self, name: str, query: dict[str, str]) -> None:
        pod = self.cluster.pods.get(name)
        if pod is None:
            self._refuse(404, f'pods "{name}" not found')
        elif pod.process is None:
            self._refuse(400, f'container "node" in pod "{name}" is waiting to start: ContainerCreating')
        else:
            self._answer(200, b"".join(pod.log[-int(query["tailLines"]) :]))


@contextmanager
def fake_cluster(kubeconfig: Path) -> Iterator[FakeCluster]:
    """Run a cluster with a kubeconfig for it. Its pods are killed at the end, and it ends when all killed pods have."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.cluster = FakeCluster()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    kubeconfig.write_text(yaml.safe_dump(config))
    try:
        yield server.cluster
    finally:
        server.shutdown()
        server.server_close()
        for name in list(server.cluster.pods):
            server.cluster.kill(name)
        for process in server.cluster.killed:
            process.wait()
