#!/usr/bin/env python3
"""A stand-in for kubectl and the cluster behind it: a pod is a process of this machine.

What there is lies in the directory FAKE_KUBECTL: trainjobs/NAME.json, pods/POD/{state,log,pid}, secrets/NAME.json, and
calls.txt with every command line. `outage` in it: no call is answered. `refuse`: its text is the answer to `apply`.
`hold`: pods stay without a node. FAKE_KUBECTL_COMMAND (JSON list) runs in place of `torchrun ... -m trainer`.

Only what the launcher uses is here, as kubectl and Kubeflow's Trainer 2.3 do it: the labels of JobSet's pods, PET_*
variables of the torch plugin, SIGTERM to the first process of a pod, SIGKILL after its grace.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import yaml

STATE = Path(os.environ.get("FAKE_KUBECTL", "."))
AWAY = "Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "000Z")


def fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(1)


def spec_of(trainjob: dict) -> dict:
    patches = trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
    return patches["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def apply(path: str) -> None:
    trainjob = yaml.safe_load(Path(path).read_text())
    name = trainjob["metadata"]["name"]
    place = STATE / "trainjobs" / f"{name}.json"
    if (STATE / "refuse").exists():
        fail((STATE / "refuse").read_text())
    if place.exists():
        print(f"trainjob.trainer.kubeflow.org/{name} unchanged")
        return
    trainjob["metadata"]["creationTimestamp"] = now()[:19] + "Z"
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(trainjob))
    for node in range(trainjob["spec"]["trainer"]["numNodes"]):
        start_pod(name, node)
    print(f"trainjob.trainer.kubeflow.org/{name} created")


def start_pod(name: str, node: int) -> None:
    directory = STATE / "pods" / f"{name}-node-0-{node}-abcde"
    directory.mkdir(parents=True)
    (directory / "job").write_text(name)
    if (STATE / "hold").exists():
        return
    process = subprocess.Popen(
        [sys.executable, __file__, "_pod", name, str(node), str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(STATE / "pods.err").open("a"),
        start_new_session=True,
    )
    (directory / "pid").write_text(str(process.pid))


def environment(trainjob: dict, node: int) -> dict[str, str]:
    trainer, name = trainjob["spec"]["trainer"], trainjob["metadata"]["name"]
    values = dict(os.environ)
    for variable in trainer["env"]:
        if "value" in variable:
            values[variable["name"]] = variable["value"]
            continue
        source = variable["valueFrom"]["secretKeyRef"]
        secret = json.loads((STATE / "secrets" / f"{source['name']}.json").read_text())
        if source["key"] in secret:
            values[variable["name"]] = secret[source["key"]]
    values["ATHANOR_JOB"] = name  # so that a test can find what is left
    return values | {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": os.environ.get("FAKE_KUBECTL_PORT", "29500"),
    }


def pod(name: str, node: str, directory: Path) -> None:
    """The first process of a pod's container, and what reads its output."""
    trainjob = json.loads((STATE / "trainjobs" / f"{name}.json").read_text())
    command = trainjob["spec"]["trainer"]["command"]
    command = [word.replace("$$", "$") for word in command]  # as Kubernetes reads `$$(`
    if "FAKE_KUBECTL_COMMAND" in os.environ:
        command = [*json.loads(os.environ["FAKE_KUBECTL_COMMAND"]), command[-1]]
    child = subprocess.Popen(
        command,
        env=environment(trainjob, int(node)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    grace = spec_of(trainjob)["terminationGracePeriodSeconds"]

    def end(*_: object) -> None:
        child.send_signal(signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda *_: child.kill())
        signal.alarm(grace)

    signal.signal(signal.SIGTERM, end)
    (directory / "state").write_text(json.dumps({"running": {"startedAt": now()}}))
    with (directory / "log").open("ab", buffering=0) as log:
        for line in child.stdout:
            log.write(now().encode() + b" " + line.rstrip(b"\n") + b"\n")
    code = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    code = code if code >= 0 else 128 - code
    reason = "OOMKilled" if code == 137 else "Error" if code else "Completed"
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}
    part = directory / "state.tmp"
    part.write_text(json.dumps(state))
    part.replace(directory / "state")


def pods_of(name: str) -> list[Path]:
    found = sorted((STATE / "pods").glob("*/job"))
    return [path.parent for path in found if path.read_text() == name]


def state_of(directory: Path) -> dict:
    path = directory / "state"
    return json.loads(path.read_text()) if path.exists() else {"waiting": {"reason": "ContainerCreating"}}


def is_over(directory: Path) -> bool:
    return "terminated" in state_of(directory) or not (directory / "pid").exists()


def get_trainjob(name: str) -> None:
    path = STATE / "trainjobs" / f"{name}.json"
    settle(name)
    if not path.exists():
        fail(f'Error from server (NotFound): trainjobs.trainer.kubeflow.org "{name}" not found')
    trainjob = json.loads(path.read_text())
    ends = [state_of(directory).get("terminated") for directory in pods_of(name)]
    conditions = []
    if any(end and end["exitCode"] for end in ends):
        conditions = [{"type": "Failed", "status": "True", "reason": "JobsFailed", "message": "jobset failed"}]
        for directory in pods_of(name):
            kill(directory)
    elif ends and all(ends):
        conditions = [{"type": "Complete", "status": "True", "reason": "JobsCompleted", "message": "all done"}]
    if (STATE / "condition").exists():
        conditions.append(json.loads((STATE / "condition").read_text()))
    trainjob["status"] = {"conditions": conditions}
    print(json.dumps(trainjob))


def get_pods(name: str) -> None:
    items = []
    for directory in pods_of(name):
        index = directory.name.split("-")[-2]
        labels = {"jobset.sigs.k8s.io/jobset-name": name, "batch.kubernetes.io/job-completion-index": index}
        status = {"containerStatuses": [{"name": "node", "state": state_of(directory)}]}
        if (STATE / "hold").exists():
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}
            status = {"conditions": [why]}
        items.append({"metadata": {"name": directory.name, "labels": labels}, "status": status})
    print(json.dumps({"items": items}))


def kill(directory: Path, number: int = signal.SIGTERM) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if not is_over(directory):
            os.kill(int((directory / "pid").read_text()), number)


def delete(name: str) -> None:
    path = STATE / "trainjobs" / f"{name}.json"
    if path.exists():
        trainjob = json.loads(path.read_text())
        trainjob["metadata"]["deletionTimestamp"] = now()
        path.write_text(json.dumps(trainjob))
        for directory in pods_of(name):
            kill(directory)
    settle(name)


def settle(name: str) -> None:
    """Remove what has ended of a deleted TrainJob."""
    path = STATE / "trainjobs" / f"{name}.json"
    if not path.exists() or "deletionTimestamp" not in json.loads(path.read_text())["metadata"]:
        return
    for directory in pods_of(name):
        if is_over(directory):
            shutil.rmtree(directory)
    if not pods_of(name):
        path.unlink()


def logs(name: str, follow: bool, since: str) -> None:
    """Lines since a second; a stream breaks where `break` is in the directory (once), in the middle of a line."""
    directory = STATE / "pods" / name
    if not (directory / "log").exists():
        fail(f'Error from server (BadRequest): container "node" in pod "{name}" is waiting to start')
    printed = False
    with (directory / "log").open("rb") as file:  # read to its end, also when the pod is gone meanwhile
        while True:
            over = is_over(directory)
            while line := file.readline():
                if line[:19] < since[:19].encode():
                    continue
                if (STATE / "break").exists() and printed:
                    (STATE / "break").unlink()
                    sys.stdout.buffer.write(line[: len(line) // 2])
                    sys.exit(0)
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
                printed = True
            if over or not follow:
                return
            time.sleep(0.02)


def main(argv: list[str]) -> None:
    if argv[0] == "_pod":
        pod(argv[1], argv[2], Path(argv[3]))
        return
    with (STATE / "calls.txt").open("a") as file:
        file.write(" ".join(argv) + "\n")
    if (STATE / "outage").exists():
        fail(AWAY)
    options = dict(part.partition("=")[::2] for part in argv if part.startswith("--"))
    words = [part for part in argv if not part.startswith("--")]
    if words[0] == "apply":
        apply(words[2])
    elif words[:2] == ["get", "pods"]:
        get_pods(words[3].partition("=")[2])
    elif words[0] == "get":
        get_trainjob(words[2])
    elif words[:2] == ["delete", "pods"]:
        for directory in pods_of(words[3].partition("=")[2]):
            kill(directory, signal.SIGKILL)
            shutil.rmtree(directory)
    elif words[0] == "delete":
        delete(words[2])
    elif words[0] == "logs" and "--tail" in options:
        lines = (STATE / "pods" / words[1] / "log").read_text().splitlines()
        print("\n".join(line.partition(" ")[2] for line in lines[-int(options["--tail"]) :]))
    elif words[0] == "logs":
        logs(words[1], "--follow" in options, options.get("--since-time", ""))
    else:
        fail(f"error: unknown command {argv}")


if __name__ == "__main__":
    main(sys.argv[1:])
