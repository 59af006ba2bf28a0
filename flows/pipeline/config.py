"""PipelineConfig: all settings of a recipe, checked together and across stages. ExecutionConfig: those of where and how
a pipeline runs, none of which changes a byte of an artifact.
"""

import difflib
import os
import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import shown
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import check_no_userinfo
from flows.tracking.config import RegistryConfig, TrackingConfig
from stages.contamination.config import ContaminationConfig
from stages.convert.config import RAW, ConvertConfig, MixedConvertConfig, SourceReading, raw_role
from stages.encode_images.config import EncodeImagesConfig
from stages.evaluate.config import CompareConfig, EvaluateConfig
from stages.export.config import ExportConfig
from stages.plan_bins.config import PlanBinsConfig
from stages.shared.inputs.config import (
    EmbeddedDataConfig,
    EmbeddedEasyVqaConfig,
    EmbeddedModelConfig,
    EmbeddedMovesConfig,
    EmbeddedShapesConfig,
)
from stages.shared.inputs.served import unservable_adapter
from stages.shared.launchers.config import ClusterConfig
from stages.shared.scoring.names import SAME_ANSWERS
from stages.tokenize.config import TokenizeConfig
from stages.verify.config import VerifyConfig
from trainer.contract.run import TrainConfig, TrainerExecution
from trainer.model.shape import ModelShape
from trainer.plan.layout import FieldNames, check_layout

# The kinds of `data` and `model`.
EMBEDDED = "embedded"
EASY_VQA = "easy_vqa"
SHAPES = "shapes"
MOVES = "moves"
SOURCE = "source"
SOURCES = "sources"
EMBEDDED_RECIPES = (
    "embedded",
    "adapter",
    "easy-vqa",
    "shapes",
    "shapes-gpu",
    "moves",
)  # names of the recipes whose data a stage makes


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


def _kind(value: object) -> str:
    return SOURCES if isinstance(value, list | tuple) else SOURCE if isinstance(value, str) else EMBEDDED


def _data_kind(value: object) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    # A wrong kind is reported as the nearest one.
    return _kind(value) if kind is None else difflib.get_close_matches(str(kind), (EASY_VQA, SHAPES, MOVES), 1, 0)[0]


class DataSource(SourceReading):
    """One of several sources of raw rows."""

    source: str = Field(min_length=1, description="directory, file, URL or hub name")
    name: str = Field(
        pattern="^[A-Za-z0-9-]{1,40}$",
        description="prefix of the names of its subsets, followed by an underscore: mine_train",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="its share of an epoch's tokens, in proportion to the other shares; the scarcest source is used "
        "completely; null: all of the source",
    )

    @property
    def reading(self) -> SourceReading:
        """The settings by which the rows are read, without the address of the source."""
        return SourceReading(**{name: getattr(self, name) for name in SourceReading.model_fields})


Data = Annotated[
    Annotated[EmbeddedDataConfig, Tag(EMBEDDED)]
    | Annotated[EmbeddedEasyVqaConfig, Tag(EASY_VQA)]
    | Annotated[EmbeddedShapesConfig, Tag(SHAPES)]
    | Annotated[EmbeddedMovesConfig, Tag(MOVES)]
    | Annotated[str, Tag(SOURCE), Field(min_length=1, description="directory, file, URL or hub name")]
    | Annotated[tuple[DataSource, ...], Tag(SOURCES), Field(min_length=1)],
    Discriminator(_data_kind),
]

Model = Annotated[
    Annotated[EmbeddedModelConfig, Tag(EMBEDDED)]
    | Annotated[str, Tag(SOURCE), Field(min_length=1, description="HF directory or hub name")],
    Discriminator(_kind),
]


class PipelineConfig(StrictModel):
    """A whole pipeline run. `data` and `model` are settings of embedded data or models, or directories or hub names."""

    model_config = ConfigDict(hide_input_in_errors=True)  # otherwise a traceback could show a URL with its password

    name: str = Field(
        pattern="^[a-z0-9][a-z0-9-]*$",
        description="name of the MLflow experiment and of the registered model; if an embedded recipe reads other "
        "data, the name of the data is used instead",
    )
    data: Data = Field(
        description="settings of the embedded digits, or kind=easy_vqa for the data set easy-VQA, or kind=shapes for "
        "drawn shapes, or kind=moves for drawn clips; or a directory, a file, a URL or a hub name; or a list of "
        "sources, each with name, source, builder, subsets, options and share"
    )
    model: Model = Field(description="settings of an embedded model; or an HF directory or hub name")
    start_adapter: str | None = Field(
        default=None,
        min_length=1,
        description="directory or hub name of a PEFT adapter that the training starts from; null: new adapters",
    )
    convert: ConvertConfig
    contamination: ContaminationConfig | None = Field(
        default=ContaminationConfig(),
        description="which held-out images count as seen in train and are left out of the scores; null: no search",
    )
    tokenize: TokenizeConfig
    plan_bins: PlanBinsConfig
    encode_images: EncodeImagesConfig | None = Field(
        default=None,
        description="settings with which a frozen vision encoder encodes each image once, before the training; null: "
        "images are encoded at every use",
    )
    train: TrainConfig
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig
    compare: CompareConfig | None = Field(
        default=CompareConfig(), description="comparison with the model before training; null: no comparison"
    )
    verify: VerifyConfig | None = Field(
        default=VerifyConfig(), description="held-out questions that other programs answer with the export; null: none"
    )
    execution: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _stages_fit(self) -> "PipelineConfig":
        urls = {
            "data": self.data,
            "model": self.model,
            "start_adapter": self.start_adapter,
            "execution.dask_address": self.execution.dask_address,
        }
        for field, value in urls.items():
            check_no_userinfo(value if isinstance(value, str) else "", field)
        self._check_sources()
        self._check_lengths()
        self._check_profile()
        self._check_adapter()
        if SAME_ANSWERS in self.execution.registry.gates and self.verify is None:
            raise ValueError(
                f"execution.registry.gates.{SAME_ANSWERS} needs the answers of other programs, and verify=null asks "
                f"for none; leave out verify=null, or give execution.registry.gates without {SAME_ANSWERS}"
            )
        if self.train.experts.force_balance:
            raise ValueError(
                "train.experts.force_balance=true deals tokens to experts without regard to the router, which is for "
                "measurements of speed, and a recipe registers its model; remove it"
            )
        self.check_parallel(self.model.shape if isinstance(self.model, EmbeddedModelConfig) else None)
        readings = self.convert_config.readings.values()
        if self.convert.heldout_fraction == 0 and not all(
            each.heldout_files or get_builder(each.builder).has_splits for each in readings
        ):
            raise ValueError(
                "convert.heldout_fraction=0 leaves nothing to evaluate on; try convert.heldout_fraction=0.1"
            )
        return self

    def _check_sources(self) -> None:
        """Check that each source has a builder, and that several sources have different names."""
        if self.plan_bins.shares:
            raise ValueError(
                f"plan_bins.shares={shown(self.plan_bins.shares)} is filled in from data; give each source of data its "
                "share, or for subsets of one source set plan_bins.mixture={SUBSET: {weight: 2}}"
            )
        if not isinstance(self.data, tuple):
            if self.convert.builder is None:
                raise ValueError("convert.builder is missing; `athanor init DATA` finds the one that reads the data")
            return
        names = [each.name for each in self.data]
        if self.convert.builder is not None:
            raise ValueError(
                f"convert.builder={self.convert.builder} belongs to one source, and data lists {len(names)}; give each "
                "of them its builder and options, and leave out those of convert"
            )
        for each in self.data:
            check_no_userinfo(each.source, f"the source of data {each.name}")
            if each.builder is None:
                raise ValueError(f"the source {each.name} of data has no builder; `athanor init` finds it")
        if len(set(names)) < len(names):
            raise ValueError(f"two sources of data have the same name: {', '.join(names)}; rename one")

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
                    f"plan_bins.max_patches={self.plan_bins.max_patches}; try plan_bins.max_patches={patches} or "
                    f"tokenize.max_pixels={self.plan_bins.max_patches * self.model.patch_size**2}"
                )

    def _check_profile(self) -> None:
        profile, processes = self.execution.profile, self.execution.cluster.processes
        if profile is None:
            return
        if self.train.num_steps is not None and profile.first_step > self.train.num_steps:
            raise ValueError(
                f"execution.profile.first_step={profile.first_step} is beyond train.num_steps={self.train.num_steps}; "
                "try execution.profile.first_step=1"
            )
        if profile.rank >= processes:
            raise ValueError(
                f"execution.profile.rank={profile.rank} is not below execution.cluster.processes={processes}; "
                "try execution.profile.rank=0"
            )

    def _check_adapter(self) -> None:
        if self.evaluate.adapter == "beside" and self.train.adapter is None:
            raise ValueError(
                "evaluate.adapter=beside asks the base model with an adapter, and train.adapter is null; try "
                "evaluate.adapter=merged"
            )
        if self.evaluate.adapter == "beside" and self.evaluate.engine == "vllm":
            config = {"use_dora": self.train.adapter.kind == "dora", "r": self.train.adapter.rank}
            if refused := unservable_adapter(config, self.train.adapter.modules_to_save):
                raise ValueError(
                    f"evaluate.adapter=beside is not for evaluate.engine=vllm: {refused}; try "
                    "evaluate.engine=transformers, or evaluate.adapter=merged"
                )

    def check_parallel(self, shape: ModelShape | None) -> None:
        """Check the layout against the model, the batch and the bins.

        Args:
            shape: the shape of the model; None if it is not known yet.

        Raises:
            InputError: the layout does not fit.
        """
        check_layout(
            self.execution.parallel,
            shape,
            world_size=self.execution.cluster.processes,
            global_batch_size=self.train.global_batch_size,
            seq_len=self.plan_bins.seq_len,
            pad_multiple=self.plan_bins.pad_multiple,
            names=FieldNames("execution.parallel.", "execution.cluster.processes"),
        )

    @property
    def sources(self) -> dict[str, str]:
        """Role of each raw input of the user -> its address; empty for embedded data."""
        if isinstance(self.data, tuple):
            return {raw_role(each.name): each.source for each in self.data}
        return {RAW: self.data} if isinstance(self.data, str) else {}

    @property
    def convert_config(self) -> ConvertConfig:
        """The identity config of convert, which includes the reading of each of several sources."""
        if not isinstance(self.data, tuple):
            return self.convert
        readings = {each.name: each.reading for each in self.data}
        return MixedConvertConfig(**self.convert.model_dump(), sources=readings)

    @property
    def plan_bins_config(self) -> PlanBinsConfig:
        """The identity config of plan_bins, which includes the shares of several sources."""
        sources = self.data if isinstance(self.data, tuple) else ()
        shares = {each.name: each.share for each in sources if each.share is not None}
        return self.plan_bins.model_copy(update={"shares": shares}) if shares else self.plan_bins

    @property
    def data_name(self) -> str:
        """The name of the data for people: the last part of the address, the names of several sources, or the name of
        the embedded data."""
        if isinstance(self.data, tuple):
            return "+".join(each.name for each in self.data)
        if isinstance(self.data, str):
            return os.path.basename(os.path.abspath(self.data.partition("://")[2] or self.data)) or "data"
        return "digits" if isinstance(self.data, EmbeddedDataConfig) else self.data.kind

    @property
    def mlflow_name(self) -> str:
        """The name of the MLflow experiment and of the registered model. It is made from the recipe's name, or from the
        data's name if a recipe of EMBEDDED_RECIPES reads other data."""
        if isinstance(self.data, BaseModel) or self.name not in EMBEDDED_RECIPES:
            return f"athanor-{self.name}"
        words = re.sub("[^a-z0-9]+", "-", self.data_name.lower()).strip("-") or "data"
        return f"athanor-{words}" if words not in EMBEDDED_RECIPES else f"athanor-{words}-data"

    def identity(self) -> dict[str, object]:
        """Return all settings except `execution`, as plain JSON.

        Fields that were added later are omitted where they are null, so that older fingerprints stay valid.
        """
        unset = {name for name in ("encode_images", "start_adapter") if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude={"execution", *unset})
