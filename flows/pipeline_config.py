"""PipelineConfig: everything that a recipe says, checked at once and across stages."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from dataset_builders.contracts.store import check_no_userinfo
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.registry import get_builder
from stages.cluster_config import ClusterConfig
from stages.contamination import ContaminationConfig
from stages.convert import ConvertConfig
from stages.drawn_data import DrawnDataConfig
from stages.embedded_data import EmbeddedDataConfig
from stages.embedded_model import EmbeddedModelConfig
from stages.estimate import facts_of_embedded
from stages.evaluate_config import CompareConfig, EvaluateConfig
from stages.export import ExportConfig
from stages.plan_bins import PlanBinsConfig
from stages.registry_config import RegistryConfig
from stages.tokenize_samples import TokenizeConfig
from trainer.contract import CheckpointConfig, ParallelConfig, ProfileConfig, TrainConfig
from trainer.contract.layout import FieldNames, check_layout
from trainer.contract.model_facts import ModelFacts

EMBEDDED = "embedded"
DRAWN = "drawn"
SOURCE = "source"


def _kind(value: object) -> str:
    return SOURCE if isinstance(value, str) else EMBEDDED


def _data_kind(value: object) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return DRAWN if kind == DRAWN else _kind(value)


Data = Annotated[
    Annotated[EmbeddedDataConfig, Tag(EMBEDDED)] | Annotated[DrawnDataConfig, Tag(DRAWN)] | Annotated[str, Tag(SOURCE)],
    Discriminator(_data_kind),
]
Model = Annotated[
    Annotated[EmbeddedModelConfig, Tag(EMBEDDED)] | Annotated[str, Tag(SOURCE)],
    Discriminator(_kind),
]


class ExecutionConfig(StrictModel):
    """Where and how; changes no result and enters no fingerprint."""

    num_workers: int = Field(default=0, ge=0, description="processes of the data stages; 0: one a CPU core")
    dask_address: str | None = Field(
        default=None,
        description="scheduler of a Dask cluster that does the data stages' shards, for example tcp://host:8786; "
        "null: processes of this machine",
    )
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loader_workers: int = Field(default=2, gt=0, description="threads of a trainer process that read bins ahead")
    model_code_sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="of the Python files in the model's directory, which is refused without it; they are never run",
    )
    cuda_graphs: bool = Field(
        default=True, description="the trainer launches the language layers as CUDA graphs where that is possible"
    )
    log_interval: int = Field(default=1, gt=0, description="steps between two lines of metrics.jsonl")
    profile: ProfileConfig | None = Field(
        default=None, description="steps of the training that torch.profiler traces; null: none"
    )
    registry: RegistryConfig = RegistryConfig()


class PipelineConfig(StrictModel):
    """A whole pipeline run. `data` and `model` are settings of what is made here, or a directory or hub name."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a traceback would show a URL with its password

    name: str = Field(
        pattern="^[a-z0-9][a-z0-9-]*$", description="of the MLflow experiment and of the registered model"
    )
    data: Data = Field(
        description="settings of the embedded digits, or of drawn sets (kind: drawn); or a directory of "
        "<subset>/*.parquet, or a hub dataset"
    )
    model: Model = Field(description="embedded model's settings; or an HF directory or hub name")
    convert: ConvertConfig
    contamination: ContaminationConfig | None = Field(
        default=ContaminationConfig(),
        description="which held-out pictures count as in train, and so in no score; null: they are not looked for",
    )
    tokenize: TokenizeConfig
    plan_bins: PlanBinsConfig
    train: TrainConfig
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig
    compare: CompareConfig | None = Field(
        default=CompareConfig(), description="comparison with the model before training; null: none"
    )
    execution: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _stages_fit(self) -> "PipelineConfig":
        urls = {"data": self.data, "model": self.model, "execution.dask_address": self.execution.dask_address}
        for field, value in urls.items():
            check_no_userinfo(value if isinstance(value, str) else "", field)
        self._check_lengths()
        self._check_profile()
        self.check_parallel(
            facts_of_embedded(self.model.model_dump()) if isinstance(self.model, EmbeddedModelConfig) else None
        )
        if self.convert.heldout_fraction == 0 and not get_builder(self.convert.builder).has_splits:
            raise ValueError(
                "convert.heldout_fraction=0 leaves nothing to evaluate on; try convert.heldout_fraction=0.1"
            )
        return self

    def _check_lengths(self) -> None:
        if self.tokenize.max_seq_len > self.plan_bins.seq_len:
            raise ValueError(
                f"tokenize.max_seq_len={self.tokenize.max_seq_len} is more than a bin holds "
                f"(plan_bins.seq_len={self.plan_bins.seq_len}); try tokenize.max_seq_len={self.plan_bins.seq_len}"
            )
        if isinstance(self.model, EmbeddedModelConfig):
            patches = (self.tokenize.max_pixels or self.model.max_pixels) // self.model.patch_size**2
            if patches > self.plan_bins.max_patches:
                raise ValueError(
                    f"one picture of tokenize.max_pixels has {patches} patches, more than "
                    f"plan_bins.max_patches={self.plan_bins.max_patches}; try plan_bins.max_patches={patches}"
                )

    def _check_profile(self) -> None:
        profile, processes = self.execution.profile, self.execution.cluster.processes
        if profile is None:
            return
        if profile.first_step > self.train.num_steps:
            raise ValueError(
                f"execution.profile.first_step={profile.first_step} is beyond train.num_steps={self.train.num_steps}; "
                "try execution.profile.first_step=1"
            )
        if profile.rank >= processes:
            raise ValueError(
                f"execution.profile.rank={profile.rank} is none of execution.cluster.processes={processes}; "
                "try execution.profile.rank=0"
            )

    def check_parallel(self, facts: ModelFacts | None) -> None:
        """See that the layout fits everything it meets.

        Args:
            facts: of the model; None while its directory has not been looked at.

        Raises:
            InputError: it does not fit.
        """
        check_layout(
            self.execution.parallel,
            facts,
            world_size=self.execution.cluster.processes,
            global_batch_size=self.train.global_batch_size,
            seq_len=self.plan_bins.seq_len,
            pad_multiple=self.plan_bins.pad_multiple,
            names=FieldNames("execution.parallel.", "execution.cluster.processes"),
        )

    def identity(self) -> dict[str, object]:
        """Everything but how and where it runs, as plain JSON."""
        return self.model_dump(mode="json", exclude={"execution"})
