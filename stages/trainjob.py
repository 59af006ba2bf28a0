"""The TrainJob that the trainer runs as on Kubernetes: what Kubeflow's Trainer v2 is told.

Format: trainer.kubeflow.org/v1alpha1 as of Trainer 2.3. Its torch plugin gives the container named `node` the variables
PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which are torchrun's own options:
the command names none of them. What a TrainJob may not set (restarts, above all) is in its runtime,
infra/kubernetes/runtime.yaml.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import is_local
from stages.cluster_config import ClusterConfig
from stages.job_processes import JOB_VARIABLE
from stages.launch import TRAINER_ENVIRONMENT, Job
from stages.rank_logs import as_rank
from trainer.contract import RunConfig

API_VERSION = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"  # the trainer's container, and the job of the JobSet that it is in
OWN = "athanor/"  # prefix of our labels and annotations
CONTENT = f"{OWN}content"  # annotation: what was asked for, to know a living job again
MANAGED_BY = {"app.kubernetes.io/managed-by": "athanor"}
LEFTOVER_SECONDS = 10  # for torchrun to follow, once the workers have saved


def trainjob_name(job: Job) -> str:
    """A name of the cluster that is the same for every try of the same work: athanor-<what>-<12 hex digits>."""
    digest = hashlib.sha256(job.name.encode()).hexdigest()[:12]
    what = re.sub(r"[^a-z0-9]+", "-", Path(job.name).name.lower()).strip("-")[:24].strip("-")
    return "-".join(part for part in ("athanor", what, digest) if part)


def make_trainjob(cluster: ClusterConfig, job: Job) -> dict[str, Any]:
    """The manifest. It holds names of secrets, never their values.

    Raises:
        InputError: the cluster's image or claim is missing, or a path of the run lies outside of the claim.
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
    """The manifest as YAML; the same manifest gives the same text."""
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def check_cluster(cluster: ClusterConfig) -> None:
    """See that what has no default is there.

    Raises:
        InputError: it is not.
    """
    for name in ("image", "claim"):
        if getattr(cluster.kubernetes, name) is None:
            raise InputError(
                f"execution.cluster.kubernetes.{name} is not set, and launcher=kubernetes needs it; "
                f"try --set execution.cluster.kubernetes.{name}=..."
            )


def check_paths(cluster: ClusterConfig, job: Job) -> None:
    """See that the pods find every path of this machine that the run names: below the claim, at the same place.

    Raises:
        InputError: they do not, or the claim or the image is not set.
    """
    check_cluster(cluster)
    mount = Path(cluster.kubernetes.mount_path)
    for name, path in _paths(job).items():
        if not path.is_relative_to(mount):
            raise InputError(
                f"{name}={path} lies outside of execution.cluster.kubernetes.mount_path={mount}, which is all that the "
                f"pods see; put it there (--root {mount}/...), or mount the claim where it is"
            )


def _paths(job: Job) -> dict[str, Path]:
    """The paths of run.json by field; of the file itself where it is not written yet."""
    run_json = Path(job.arguments[-1])
    paths = {"run.json": run_json}
    if run_json.is_file():
        try:
            run = RunConfig.model_validate_json(run_json.read_text(encoding="utf-8"))
        except ValidationError:
            return paths  # not ours: a job of another kind
        found = {name: getattr(run, name) for name in RunConfig.model_fields if name.endswith("_dir")}
        paths |= {name: path for name, path in found.items() if path is not None and is_local(path)}
    return paths


def _command(job: Job) -> list[str]:
    rank = as_rank(job.log_path.parent, ["python", *job.arguments])
    return ["torchrun", "--max-restarts=0", "--no-python", *map(_escaped, rank)]


def _escaped(word: str) -> str:
    """A word that Kubernetes leaves as it is: it would read `$(NAME)` as a variable, and `$$` as `$`."""
    return word.replace("$$", "$$$$").replace("$(", "$$(")


def _resources(cluster: ClusterConfig) -> dict[str, Any]:
    """Requests and limits are the same, so that a pod is not evicted for using what it asked for."""
    config = cluster.kubernetes
    gpus = cluster.processes // cluster.nodes if config.gpus_per_node is None else config.gpus_per_node
    asked = {
        "cpu": config.cpus_per_node and str(config.cpus_per_node),
        "memory": config.memory_per_node,
        config.gpu_resource: str(gpus) if gpus else None,
    }
    amounts = {name: amount for name, amount in asked.items() if amount}
    return {"requests": amounts, "limits": dict(amounts)}


def _environment(cluster: ClusterConfig, job: Job) -> list[dict[str, Any]]:
    config = cluster.kubernetes
    values = {JOB_VARIABLE: job.name, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **TRAINER_ENVIRONMENT}
    # torchrun would give its ranks 30 s to save, however long they were given
    values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(cluster.stop_grace_seconds))
    threads = cluster.num_threads or (config.cpus_per_node or 0) * cluster.nodes // cluster.processes
    if threads:
        values["OMP_NUM_THREADS"] = str(threads)
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    for name in config.secret_variables if config.secret else ():
        source = {"name": config.secret, "key": name, "optional": True}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    return variables


def _patch(cluster: ClusterConfig) -> dict[str, Any]:
    """What the runtime's pods get beside the trainer's own fields: the root, shared memory, time to save."""
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
    """16 hex digits over the manifest and run.json."""
    digest = hashlib.sha256(render_trainjob(manifest).encode())
    run_json = Path(job.arguments[-1])
    digest.update(run_json.read_bytes() if run_json.is_file() else b"")
    return digest.hexdigest()[:16]
