"""ClusterConfig: where the trainer runs and with how many processes. It is execution: no fingerprint includes it."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel

JOB_FILES = {  # the job file of each launcher that needs one, for messages
    "slurm": "your sbatch header, at least the lines `#SBATCH --partition=NAME` and `#SBATCH --gpus-per-node=NUMBER`",
    "kubernetes": "your TrainJob in YAML; start from infra/kubernetes/trainjob.yaml",
}


class ClusterConfig(StrictModel):
    """Execution: where the trainer runs and with how many processes."""

    launcher: Literal["torchrun", "slurm", "kubernetes"] = Field(
        default="torchrun",
        description="torchrun: processes on this host; slurm: an sbatch job; kubernetes: a Kubeflow TrainJob",
    )
    job_file: Path | None = Field(
        default=None,
        description="your file that the job is made from: #SBATCH lines and bash for slurm, a TrainJob for kubernetes",
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

    @model_validator(mode="after")
    def _nodes_fit(self) -> "ClusterConfig":
        if self.processes % self.nodes:
            raise ValueError(
                f"processes={self.processes} do not divide over nodes={self.nodes}; try processes="
                f"{-(-self.processes // self.nodes) * self.nodes}"
            )
        if self.is_here and self.nodes > 1:
            raise ValueError(f"nodes={self.nodes} needs a launcher for several hosts; try launcher=slurm")
        if self.launcher in JOB_FILES and self.job_file is None:
            raise ValueError(f"launcher={self.launcher} needs job_file, the path of {JOB_FILES[self.launcher]}")
        return self

    @property
    def is_here(self) -> bool:
        """Whether a job's processes run on this machine, as children of the flow."""
        return self.launcher == "torchrun"

    @property
    def per_node(self) -> int:
        """The number of trainer processes on each host."""
        return self.processes // self.nodes

    @property
    def limit(self) -> str:
        """The name of the concurrency limit that a job holds while it runs (flows/pipeline/limits.py)."""
        return "gpu-host" if self.is_here else f"{self.launcher}:{self.job_file.stem}"
