"""The TrainJob of Kubeflow's Trainer v2 that runs the trainer on Kubernetes.

Format: trainer.kubeflow.org/v1alpha1 as of Trainer 2.3. Its torch plugin sets the variables PET_NNODES,
PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT in the container named `node`. torchrun reads
them as its options, so the command names none of them. Settings that a TrainJob cannot have (restarts, for example) are
in its runtime, infra/kubernetes/runtime.yaml.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dataset_builders.errors import InputError
from dataset_builders.storage.store import is_local
from stages.launchers.config import ClusterConfig
from stages.launchers.job import Job, rank_environment
from stages.launchers.rank_logs import as_rank
from trainer.contract.run import parse_run

API_VERSION = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"  # the trainer's container, and its job in the JobSet
OWN = "athanor/"  # prefix of our labels and annotations
CONTENT = f"{OWN}content"  # annotation: digest of the content, which identifies a live job
MANAGED_BY = {"app.kubernetes.io/managed-by": "athanor"}
LEFTOVER_SECONDS = 10  # for torchrun to end, after the workers have saved


def trainjob_name(job: Job) -> str:
    """Return a name that is the same for every try of the same work: athanor-<what>-<12 hex digits>."""
    digest = hashlib.sha256(job.name.encode()).hexdigest()[:12]
    what = re.sub(r"[^a-z0-9]+", "-", Path(job.name).name.lower()).strip("-")[:24].strip("-")
    return "-".join(part for part in ("athanor", what, digest) if part)


def make_trainjob(cluster: ClusterConfig, job: Job) -> dict[str, Any]:
    """Return the manifest. It contains names of secrets, never their values.

    Raises:
        InputError: the cluster's image or claim is missing, or a path of the run is outside of the claim.
    """
    check_paths(cluster, job)
    config = cluster.kubernetes
    spec = {
        "runtimeRef": {"apiGroup": API_VERSION.split("/")[0], "kind": config.runtime_kind, "name": config.runtime},
        "activeDeadlineSeconds": math.ceil(cluster.timeout_seconds),
        "trainer": {
            "image": config.image,
            "command": _command(job),
            "numNodes": cluster.nodes,
            "numProcPerNode": cluster.processes // cluster.nodes,
            "resourcesPerNode": _resources(cluster),
            "env": _environment(cluster, job),
        },
        "runtimePatches": [{"manager": f"{OWN}launcher", "trainingRuntimeSpec": _patch(cluster)}],
    }
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": {
            "name": trainjob_name(job),
            "namespace": config.namespace,
            "labels": {**config.labels, **MANAGED_BY},
            "annotations": {f"{OWN}directory": job.name},
        },
        "spec": spec,
    }
    manifest["metadata"]["annotations"][CONTENT] = _content(manifest, job)
    return manifest


def render_trainjob(manifest: dict[str, Any]) -> str:
    """Return the manifest as YAML; the same manifest gives the same text."""
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def check_cluster(cluster: ClusterConfig) -> None:
    """Check the settings that have no default.

    Raises:
        InputError: a setting is missing.
    """
    for name in ("image", "claim"):
        if getattr(cluster.kubernetes, name) is None:
            raise InputError(
                f"execution.cluster.kubernetes.{name} is not set, and launcher=kubernetes needs it; "
                f"try --set execution.cluster.kubernetes.{name}=..."
            )


def check_paths(cluster: ClusterConfig, job: Job) -> None:
    """Check that the pods see every path of the run: below the claim, at the same path.

    Raises:
        InputError: a path is outside of the claim, or the claim or the image is not set.
    """
    check_cluster(cluster)
    mount = Path(cluster.kubernetes.mount_path)
    for name, path in _paths(job).items():
        if not path.is_relative_to(mount):
            raise InputError(
                f"{name}={path} lies outside of execution.cluster.kubernetes.mount_path={mount}, and pods see nothing "
                f"else; put it there (--root {mount}/...), or mount the claim where it is"
            )


def _paths(job: Job) -> dict[str, Path]:
    """Return the paths in run.json by field, and run.json itself, which may not be written yet."""
    run_json = Path(job.arguments[-1])
    paths = {"run.json": run_json}
    if run_json.is_file():
        try:
            run = parse_run(run_json.read_text(encoding="utf-8"))
        except ValidationError:
            return paths  # a job of another kind
        directories = {name: getattr(run, name) for name in type(run).model_fields if name.endswith("_dir")}
        paths |= {name: path for name, path in directories.items() if path is not None and is_local(path)}
    return paths


def _command(job: Job) -> list[str]:
    rank = as_rank(job.log_path.parent, ["python", *job.arguments])
    # Kubernetes would read `$(NAME)` as a variable, and `$$` as `$`.
    escaped = [word.replace("$$", "$$$$").replace("$(", "$$(") for word in rank]
    return ["torchrun", "--max-restarts=0", "--no-python", *escaped]


def _resources(cluster: ClusterConfig) -> dict[str, Any]:
    """Return requests, and equal limits, so that no pod is evicted for using what it requested."""
    config = cluster.kubernetes
    gpus = cluster.processes // cluster.nodes if config.gpus_per_node is None else config.gpus_per_node
    settings = {
        "cpu": config.cpus_per_node and str(config.cpus_per_node),
        "memory": config.memory_per_node,
        config.gpu_resource: str(gpus) if gpus else None,
    }
    amounts = {name: amount for name, amount in settings.items() if amount}
    return {"requests": amounts, "limits": dict(amounts)}


def _environment(cluster: ClusterConfig, job: Job) -> list[dict[str, Any]]:
    config = cluster.kubernetes
    values = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **rank_environment(cluster, job.name)}
    threads = cluster.num_threads or (config.cpus_per_node or 0) * cluster.nodes // cluster.processes
    if threads:
        values["OMP_NUM_THREADS"] = str(threads)
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    for name in config.secret_variables if config.secret else ():
        source = {"name": config.secret, "key": name, "optional": True}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    return variables


def _patch(cluster: ClusterConfig) -> dict[str, Any]:
    """Return changes to the runtime's pods beyond the trainer's fields: the root, shared memory, time to save."""
    config = cluster.kubernetes
    volumes: list[dict[str, Any]] = [{"name": "root", "persistentVolumeClaim": {"claimName": config.claim}}]
    mounts = [{"name": "root", "mountPath": config.mount_path}]
    if config.shared_memory:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": config.shared_memory}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    user = config.run_as_user
    spec = {
        "terminationGracePeriodSeconds": math.ceil(cluster.stop_grace_seconds) + LEFTOVER_SECONDS,
        "serviceAccountName": config.service_account,
        "nodeSelector": dict(config.node_selector) or None,
        "securityContext": None if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user},
        "volumes": volumes,
        "containers": [{"name": CONTAINER, "volumeMounts": mounts}],
    }
    pod = {"spec": {name: value for name, value in spec.items() if value is not None}}
    return {"template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": {"spec": {"template": pod}}}]}}}


def _content(manifest: dict[str, Any], job: Job) -> str:
    """Return 16 hex digits over the manifest and run.json."""
    digest = hashlib.sha256(render_trainjob(manifest).encode())
    run_json = Path(job.arguments[-1])
    digest.update(run_json.read_bytes() if run_json.is_file() else b"")
    return digest.hexdigest()[:16]
