"""The TrainJob of Kubeflow's Trainer v2 that runs the trainer on Kubernetes.

It is the user's own, execution.cluster.job_file, with the name, the command, the size and the times of this job.

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

from dataset_builders.errors import InputError, one_line, shown
from dataset_builders.storage.store import is_local
from stages.shared.launchers.config import JOB_FILES, ClusterConfig
from stages.shared.launchers.job import Job, as_rank, rank_environment, read_job_file
from trainer.contract.run import parse_run

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
    metadata, trainer = manifest["metadata"], manifest["spec"]["trainer"]
    _put(cluster, manifest, "spec.trainer", {"command": _command(job)})
    trainer["env"] = [*_environment(cluster, manifest, job), *(trainer.get("env") or [])]
    metadata["labels"] = {**(metadata.get("labels") or {}), **MANAGED_BY}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), f"{OWN}directory": job.name}
    metadata["annotations"][CONTENT] = _content(manifest, job)
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
    volumes, mounts = _part(cluster, manifest, f"{POD}.volumes"), _part(cluster, manifest, MOUNTS)
    lost = {volume.get("name") for volume in volumes if "emptyDir" in volume}
    kept = [mount["mountPath"] for mount in mounts if mount.get("name") not in lost and "mountPath" in mount]
    for name, path in _paths(job).items():
        if not any(path.is_relative_to(mount) for mount in kept):
            raise InputError(
                f"{name}={path} lies outside of the volumes that {cluster.job_file} mounts ({', '.join(kept)}), and "
                "pods see nothing else; put it there (--root), or mount its volume at the same path"
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
    words = ["/bin/sh", "-c", _ON_NODE, str(job.log_path), "torchrun", "--max-restarts=0", "--no-python", *rank]
    # Kubernetes would read `$(NAME)` as a variable, and `$$` as `$`.
    return [word.replace("$$", "$$$$").replace("$(", "$$(") for word in words]


def _environment(cluster: ClusterConfig, manifest: dict[str, Any], job: Job) -> list[dict[str, Any]]:
    """Return the variables that the file does not set itself."""
    values = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **rank_environment(cluster, job.name)}
    cpus = str(_part(cluster, manifest, LIMITS).get("cpu", ""))
    if threads := cluster.num_threads or (int(cpus) // cluster.per_node if cpus.isdigit() else 0):
        values["OMP_NUM_THREADS"] = str(threads)
    theirs = {entry.get("name") for entry in manifest["spec"]["trainer"].get("env") or []}
    return [{"name": name, "value": value} for name, value in values.items() if name not in theirs]


def _content(manifest: dict[str, Any], job: Job) -> str:
    """Return 16 hex digits over the manifest and run.json."""
    digest = hashlib.sha256(render_trainjob(manifest).encode())
    run_json = Path(job.arguments[-1])
    digest.update(run_json.read_bytes() if run_json.is_file() else b"")
    return digest.hexdigest()[:16]
