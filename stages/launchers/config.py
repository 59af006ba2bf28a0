"""ClusterConfig: where the trainer runs and with how many processes. It is execution: no fingerprint includes it."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dataset_builders.contracts.strict import StrictModel

_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"  # name of an object in Kubernetes (RFC 1123)
_QUANTITY = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)$"  # number of bytes in Kubernetes
_SBATCH = r"^[A-Za-z0-9_.,:@&|()*+=/\[\]-]+$"  # value of an #SBATCH line
_PATH = r"^[A-Za-z0-9_.,:@+=/#~-]+$"
_OPTION = r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:;@%&|()*+=/\[\]-]+)?$"
_OWN_OPTIONS = {
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "chdir", "output", "error", "input", "open-mode", "requeue"),
    *("no-requeue", "signal", "export", "export-file", "get-user-env", "array", "wrap", "wait", "parsable"),
    *("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "time", "gpus-per-node"),
    *("cpus-per-task", "mem", "exclusive"),
}
_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    *("ATHANOR_CACHE_DIR", "ATHANOR_CACHE_GB", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)


class SlurmConfig(StrictModel):
    """The options of the sbatch script; null: the cluster's default.

    Values are written to `#SBATCH` lines, so no value may contain a space, a quote or another character that is special
    to a shell or sbatch.
    """

    partition: str | None = Field(default=None, pattern=_SBATCH, description="partition, or several with commas")
    account: str | None = Field(default=None, pattern=_SBATCH, description="account that is charged")
    qos: str | None = Field(default=None, pattern=_SBATCH, description="quality of service")
    constraint: str | None = Field(
        default=None, pattern=_SBATCH, description="features that a node must have, for example h100&ib"
    )
    reservation: str | None = Field(default=None, pattern=_SBATCH, description="reservation to run in")
    nodelist: str | None = Field(default=None, pattern=_SBATCH, description="nodes that the job must have")
    exclude: str | None = Field(default=None, pattern=_SBATCH, description="nodes that the job must not have")
    time_limit: str | None = Field(
        default=None,
        pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$",
        description="time of one try, for example 08:00:00 or 2-00:00:00; at its end the job saves and is queued again",
    )
    signal_seconds: int = Field(
        default=300, ge=10, le=65535, description="seconds before the time limit at which the ranks save"
    )
    gpus_per_node: int | None = Field(
        default=None, ge=0, le=64, description="GPUs per node; null: one per process; 0: on CPU"
    )
    gpu_type: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_.-]+$", description="the cluster's name of the GPU type"
    )
    cpus_per_task: int | None = Field(
        default=None, ge=1, le=4096, description="CPU cores per node; a node has one task"
    )
    memory: str | None = Field(
        default=None, pattern=r"^[0-9]+[KMGT]?$", description="memory per node, for example 900G; 0: all of it"
    )
    exclusive: bool = Field(default=False, description="do not share nodes with other jobs")
    extra: tuple[Annotated[str, Field(pattern=_OPTION)], ...] = Field(
        default=(), description="further options of sbatch, for example [--switches=1, --gres=nvme:1]"
    )
    container_image: str | None = Field(
        default=None, pattern=_PATH, description="image that contains the trainer; null: the nodes' own file system"
    )
    container_runtime: Literal["pyxis", "apptainer"] = Field(
        default="pyxis", description="pyxis: srun --container-image; apptainer: apptainer exec --nv"
    )
    container_mounts: tuple[Annotated[str, Field(pattern=_PATH)], ...] = Field(
        default=(), description="host:container[:flags]; root, data and model must be at the same paths as on the host"
    )
    python: str | None = Field(
        default=None, pattern=_PATH, description="interpreter on the nodes; null: the flow's, or a container's python"
    )
    workdir: str | None = Field(
        default=None,
        pattern=_PATH,
        description="directory to start it in; null: athanor's own, or / of a container",
    )
    setup: tuple[Annotated[str, Field(pattern=r"^[^\r\n]+$")], ...] = Field(
        default=(), description="lines of bash to run on the first node before srun, for example [module load cuda]"
    )
    variables: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=_VARIABLES,
        description="names of environment variables that the job gets from the flow; no value is written anywhere",
    )
    rendezvous_address: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9.:_-]+$",
        description="address where the ranks meet; null: the first node's name",
    )
    poll_seconds: float = Field(default=5, ge=0.1, le=600, description="seconds between two looks at the queue")

    @field_validator("extra")
    @classmethod
    def _extra_is_not_ours(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for option in extra:
            name = option.partition("=")[0].removeprefix("--")
            if name in _OWN_OPTIONS:
                raise ValueError(f"{option} is written by the launcher; use the field of that name, or leave it out")
        return extra


class KubernetesConfig(StrictModel):
    """The settings of the TrainJob of Kubeflow's Trainer; null: the cluster's default."""

    context: str | None = Field(
        default=None, min_length=1, description="context of the kubeconfig; null: its current one"
    )
    namespace: str = Field(default="default", pattern=_NAME, max_length=63, description="namespace of the TrainJob")
    runtime: str = Field(
        default="athanor-torch",
        pattern=_NAME,
        max_length=63,
        description="training runtime that restarts nothing, such as infra/kubernetes/runtime.yaml",
    )
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        default="ClusterTrainingRuntime", description="kind of the runtime: the cluster's, or the namespace's own"
    )
    image: str | None = Field(
        default=None,
        pattern=r"^\S+$",
        max_length=500,
        description="container image that contains the trainer (infra/Dockerfile.train); required",
    )
    gpus_per_node: int | None = Field(
        default=None, ge=0, le=64, description="GPUs per node; null: one per process; 0: on CPU"
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
        description="the cluster's name of the GPU resource",
    )
    cpus_per_node: int | None = Field(default=None, ge=1, le=1024, description="CPU cores per node")
    memory_per_node: str | None = Field(
        default=None, pattern=_QUANTITY, description="memory per node, for example 512Gi"
    )
    shared_memory: str | None = Field(
        default="8Gi", pattern=_QUANTITY, description="/dev/shm per node, part of its memory; NCCL needs it"
    )
    claim: str | None = Field(
        default=None,
        pattern=_NAME,
        max_length=63,
        description="PersistentVolumeClaim (ReadWriteMany) that holds the root; required",
    )
    mount_path: str = Field(
        default="/athanor",
        pattern=r"^/[^\s:]*[^\s:/]$",
        description="mount point of the claim, in the pods and on the flow's machine; the root lies below it",
    )
    secret: str | None = Field(
        default=None, pattern=_NAME, max_length=63, description="Secret with the values of secret_variables"
    )
    secret_variables: tuple[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], ...] = Field(
        default=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"),
        description="keys of the Secret that become environment variables; missing keys are not set",
    )
    service_account: str | None = Field(
        default=None, pattern=_NAME, max_length=63, description="service account of the pods"
    )
    run_as_user: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="uid and gid of the processes; null: the image's"
    )
    node_selector: dict[str, str] = Field(default={}, description="labels that a node must have")
    labels: dict[str, str] = Field(
        default={}, description="labels of the TrainJob, for example {kueue.x-k8s.io/queue-name: team}"
    )
    poll_seconds: float = Field(default=5, ge=0.1, le=600, description="seconds between two looks at the TrainJob")


class ClusterConfig(StrictModel):
    """Execution: where the trainer runs and with how many processes."""

    launcher: Literal["torchrun", "slurm", "kubernetes"] = Field(
        default="torchrun",
        description="torchrun: processes on this host; slurm: an sbatch job; kubernetes: a Kubeflow TrainJob",
    )
    nodes: int = Field(default=1, ge=1, le=10**5, description="number of hosts; 1 with torchrun")
    processes: int = Field(
        default=1, ge=1, le=10**6, description="trainer processes over all nodes; one per GPU, or any number on CPU"
    )
    num_threads: int = Field(
        default=0, ge=0, le=4096, description="CPU threads per process; 0: the cores are shared evenly"
    )
    timeout_seconds: float = Field(default=7 * 86400, gt=0, le=10**8, description="a job that takes longer is stopped")
    stop_grace_seconds: float = Field(
        default=120, gt=0, le=86400, description="seconds to save after SIGTERM, before SIGKILL"
    )
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @model_validator(mode="after")
    def _nodes_fit(self) -> "ClusterConfig":
        if self.processes % self.nodes:
            raise ValueError(
                f"processes={self.processes} do not divide over nodes={self.nodes}; try processes="
                f"{-(-self.processes // self.nodes) * self.nodes}"
            )
        if self.launcher == "torchrun" and self.nodes > 1:
            raise ValueError(f"nodes={self.nodes} needs a launcher for several hosts; try launcher=slurm")
        return self

    @property
    def limit(self) -> str:
        """The name of the concurrency limit that a job holds while it runs (flows/resources/limits.py)."""
        if self.launcher == "slurm":
            return f"slurm:{self.slurm.partition or 'default'}"
        return f"kubernetes:{self.kubernetes.namespace}" if self.launcher == "kubernetes" else "gpu-host"
