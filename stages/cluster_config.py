"""ClusterConfig: where the trainer runs and how many processes it has. Execution: it enters no fingerprint."""

from typing import Literal

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel


class SlurmConfig(StrictModel):
    """What the sbatch script asks for; null: not asked for, the cluster's default holds."""

    partition: str | None = Field(default=None, description="--partition")
    account: str | None = Field(default=None, description="--account")


class KubernetesConfig(StrictModel):
    """What the TrainJob asks for."""

    namespace: str = Field(default="default", description="where the TrainJob is made")


class ClusterConfig(StrictModel):
    """Execution: where the trainer runs and how many processes it has."""

    launcher: Literal["torchrun", "slurm", "kubernetes"] = Field(
        default="torchrun",
        description="torchrun: processes on this host; slurm: an sbatch job; kubernetes: a Kubeflow TrainJob",
    )
    nodes: int = Field(default=1, ge=1, description="hosts; torchrun on this host has one")
    processes: int = Field(
        default=1, ge=1, description="trainer processes of all nodes; one a GPU, or any number on CPU"
    )
    num_threads: int = Field(default=0, ge=0, description="CPU threads of a process; 0 shares the cores among them")
    timeout_seconds: float = Field(default=7 * 86400, gt=0, description="a job that takes longer is stopped")
    stop_grace_seconds: float = Field(default=120, gt=0, description="time to save after SIGTERM, before SIGKILL")
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
        """Name of the concurrency limit that a job of this place holds while it runs (see flows/limits.py)."""
        if self.launcher == "slurm":
            return f"slurm:{self.slurm.partition or 'default'}"
        return f"kubernetes:{self.kubernetes.namespace}" if self.launcher == "kubernetes" else "gpu-host"
