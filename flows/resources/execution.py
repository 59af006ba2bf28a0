"""ExecutionConfig: where and how a pipeline runs. None of its settings changes a byte of an artifact."""

from pydantic import Field

from flows.tracking.config import RegistryConfig, TrackingConfig
from stages.shared.launchers.config import ClusterConfig
from trainer.contract.run import TrainerExecution


class ExecutionConfig(TrainerExecution):
    """Settings of where and how a pipeline runs. They change no result and are part of no fingerprint."""

    num_workers: int = Field(default=0, ge=0, le=1024, description="processes of the data stages; 0: one per CPU core")
    dask_address: str | None = Field(
        default=None,
        description="scheduler of a Dask cluster that makes the shards of the data stages, for example "
        "tcp://host:8786; null: processes of this machine make them",
    )
    cluster: ClusterConfig = ClusterConfig()
    model_code_sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the Python files in the model's directory, without which such a directory is refused; "
        "the files are never run",
    )
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def trainer(self) -> TrainerExecution:
        """The settings of the trainer."""
        return TrainerExecution(**{name: getattr(self, name) for name in TrainerExecution.model_fields})
