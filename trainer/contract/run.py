"""The trainer's input as run.json: RunConfig, or EncodeRun for a job that encodes images.

To add a hyperparameter, see CONTRIBUTING.md.
"""

import math
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    Field,
    model_validator,
)

from dataset_builders.contracts.manifest import FeatureType
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.storage.store import Location
from trainer.contract.adapter import AdapterConfig
from trainer.contract.modules import Wanted
from trainer.contract.parallel import ParallelConfig

# bfloat16 rounds to 2^-9 of a number, and an update moves a moment by (1 - decay) of its error. Above this decay, a
# moment with an error of a tenth no longer moves.
LONGEST_DECAY_IN_BFLOAT16 = 1 - 10 * 2**-9


class OptimConfig(StrictModel):
    """AdamW with a linear warmup and a cosine decay. No weight decay on norms and biases."""

    later_fields = ("moments", "warmup_fraction")

    lr: float = Field(gt=0, le=1, description="peak learning rate")
    min_lr_fraction: float = Field(ge=0, le=1, description="learning rate at the last step, as a fraction of the peak")
    warmup_steps: int | None = Field(
        default=None, ge=0, le=10**8, description="steps of linear warmup from 0 to the peak; null: warmup_fraction"
    )
    warmup_fraction: float | None = Field(
        default=None, ge=0, le=0.5, description="warmup as a share of all steps; null: warmup_steps"
    )
    weight_decay: float = Field(ge=0, le=1, description="decoupled weight decay")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(default=1e-8, gt=0, le=1, description="term added to the denominator")
    clip_grad_norm: float = Field(
        default=1.0, gt=0, le=1e9, description="gradients are scaled down to this global norm"
    )
    moments: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="type of both moments between two updates; bfloat16 takes 4 bytes a parameter instead of 8 and "
        "needs decays of at most 0.98",
    )

    @model_validator(mode="after")
    def _warmup_is_given_once(self) -> "OptimConfig":
        if (self.warmup_steps is None) == (self.warmup_fraction is None):
            raise ValueError(
                "give either warmup_steps or warmup_fraction and make the other null, not warmup_steps="
                f"{self.warmup_steps} and warmup_fraction={self.warmup_fraction}"
            )
        return self

    @model_validator(mode="after")
    def _moments_move(self) -> "OptimConfig":
        for name in ("adam_beta1", "adam_beta2") if self.moments == "bfloat16" else ():
            if getattr(self, name) > LONGEST_DECAY_IN_BFLOAT16:
                raise ValueError(
                    f"{name}={getattr(self, name)} changes a moment by less than moments=bfloat16 can hold; set "
                    f"{name}=0.98 or less, or moments=float32"
                )
        return self


class PartConfig(StrictModel):
    """The training of one part of the model: the vision encoder, its mergers, or the language model."""

    frozen: bool = Field(default=False, description="keep the part's weights as they are")
    lr: float | None = Field(default=None, gt=0, le=1, description="peak learning rate of this part; null: optim.lr")
    weight_decay: float | None = Field(
        default=None, ge=0, le=1, description="weight decay of this part; null: optim.weight_decay"
    )

    @model_validator(mode="after")
    def _frozen_has_no_rate(self) -> "PartConfig":
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if self.frozen and value is not None:
                raise ValueError(f"{name}={value} does nothing in a frozen part; make it null, or frozen=false")
        return self


class ExpertsConfig(StrictModel):
    """How a router is trained. By default only the loss of the answers trains it, as in transformers."""

    auxiliary_loss: Literal["pooled", "layer"] = Field(
        default="pooled",
        description="the loss that evens the experts' loads: pooled over all layers as in transformers (an even load "
        "gives top_k), or layer, each layer's own as megatron-core computes it (an even load gives 1 a layer)",
    )
    coefficient: float = Field(default=0.0, ge=0, le=1, description="factor of the auxiliary loss; 0: there is none")
    force_balance: bool = Field(
        default=False, description="deal tokens to experts in turn, for measurements of speed; nothing useful is learnt"
    )


class TrainConfig(StrictModel):
    """Identity: everything that changes the trained weights or the recorded metrics."""

    later_fields = ("adapter", "num_epochs", "experts", "mtp_loss_scaling_factor")

    seed: int = Field(ge=0, le=2**32 - 1, description="order of the bins")
    num_steps: int | None = Field(default=None, gt=0, le=10**8, description="optimizer updates; null: num_epochs")
    num_epochs: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="passes over the training bins, which decide the steps; null: num_steps",
    )
    global_batch_size: int = Field(
        gt=0, le=10**6, description="bins between two optimizer updates, over all data-parallel ranks"
    )
    precision: Literal["float32", "bfloat16", "float8"] = Field(
        description="arithmetic of forward and backward; main weights and gradients are always float32. float8: "
        "the matrix products of the language model's layers, the rest in bfloat16; needs Hopper or newer"
    )
    heldout_interval: int = Field(gt=0, le=10**8, description="steps between two measurements of the held-out loss")
    optim: OptimConfig
    vision: PartConfig = Field(default=PartConfig(), description="the vision encoder without its mergers")
    merger: PartConfig = Field(default=PartConfig(), description="the mergers to image tokens, deepstack's included")
    language: PartConfig = Field(default=PartConfig(), description="the language model with its embeddings")
    adapter: AdapterConfig | None = Field(
        default=None, description="low-rank adapters, which are then all that is trained; null: the parts are trained"
    )
    experts: ExpertsConfig = Field(default=ExpertsConfig(), description="the router of a model with experts")
    mtp_loss_scaling_factor: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="factor of the loss of multi-token prediction, by which Qwen3.5's layer for drafts is trained too; "
        "0: its tensors mtp.* are exported unchanged",
    )

    def for_bins(self, num_bins: int) -> "TrainConfig":
        """Return this config with its epochs and warmup as numbers of steps, given the number of training bins."""
        steps, optim = self.num_steps, self.optim
        if self.num_epochs is not None:
            steps = max(1, math.ceil(self.num_epochs * num_bins / self.global_batch_size))
        if optim.warmup_fraction is not None:
            warmup = int(optim.warmup_fraction * steps)
            optim = optim.model_copy(update={"warmup_steps": warmup, "warmup_fraction": None})
        if optim.warmup_steps >= steps:
            raise InputError(
                f"train.optim.warmup_steps={optim.warmup_steps} leaves nothing of the {steps} steps that "
                f"train.num_epochs={self.num_epochs} is; try train.optim.warmup_steps={steps // 10}"
            )
        return self.model_copy(update={"num_steps": steps, "num_epochs": None, "optim": optim})

    @property
    def has_float8_base(self) -> bool:
        """Whether the frozen weights of a training with adapters are held in float8."""
        return self.adapter is not None and self.adapter.base == "float8"

    @property
    def parts(self) -> dict[str, PartConfig]:
        return {"vision": self.vision, "merger": self.merger, "language": self.language}

    def part(self, name: str) -> PartConfig:
        """Return the settings of a part of the model; a part without its own settings has the defaults."""
        return self.parts.get(name, PartConfig())

    @property
    def frozen(self) -> set[str]:
        return {name for name, part in self.parts.items() if part.frozen}

    @model_validator(mode="after")
    def _something_is_trained(self) -> "TrainConfig":
        if all(part.frozen for part in self.parts.values()):
            names = ", ".join(f"{name}.frozen" for name in self.parts)
            raise ValueError(f"{names} are all true: nothing is left to train; make one of them false")
        return self

    @model_validator(mode="after")
    def _length_is_given_once(self) -> "TrainConfig":
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"give either num_steps or num_epochs and make the other null, not num_steps={self.num_steps} and "
                f"num_epochs={self.num_epochs}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> "TrainConfig":
        # `for_bins` checks a length in epochs and a warmup as a share.
        if None not in (self.num_steps, self.optim.warmup_steps) and self.optim.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of num_steps={self.num_steps}; "
                f"try optim.warmup_steps={self.num_steps // 10}"
            )
        return self


class CheckpointConfig(StrictModel):
    """Execution: when checkpoints are saved, and which checkpoints are kept."""

    save_interval: int = Field(
        default=200, gt=0, le=10**8, description="steps between two checkpoints; the last is always saved"
    )
    keep_last: int = Field(default=2, ge=1, le=10**4, description="newest checkpoints that are kept")
    keep_every: int | None = Field(
        default=None, ge=1, le=10**8, description="checkpoints of multiples of this step are kept for good; null: none"
    )
    keep_released: int = Field(
        default=1,
        ge=1,
        le=10**4,
        description="newest checkpoints that are kept, beside those of keep_every, once the model is released",
    )
    asynchronous: bool = Field(
        default=True, description="write the files while training continues, from a copy of the state in host memory"
    )


class ProfileConfig(StrictModel):
    """Execution: the steps that torch.profiler traces. A training that is finished is reused, untraced."""

    first_step: int = Field(default=5, ge=1, le=10**8, description="first traced step, counted from 1")
    num_steps: int = Field(default=2, ge=1, le=20, description="number of traced steps; each may take 100 MB of memory")
    rank: int = Field(default=0, ge=0, le=10**6, description="process that is traced")


class TrainerExecution(StrictModel):
    """Execution: how a trainer job runs, whatever it trains. A part of a recipe's `execution`; run.json has it all."""

    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loader_workers: int = Field(
        default=2, gt=0, le=256, description="threads of a trainer process that read bins ahead"
    )
    cuda_graphs: bool = Field(
        default=True, description="the trainer launches the language layers as CUDA graphs if that is possible"
    )
    modules: Wanted = Field(
        default="auto",
        description="what the trainer's layers are made of on a GPU: engine (Transformer Engine), plain (torch and our "
        "kernels), portable (without our kernels); auto: the engine where it is installed, else what the GPU can run",
    )
    log_interval: int = Field(default=1, gt=0, le=10**8, description="steps between two lines of metrics.jsonl")
    profile: ProfileConfig | None = Field(
        default=None, description="steps of the training that torch.profiler traces; null: none"
    )


class RunConfig(StrictModel):
    """The complete description of one trainer job, stored as run.json. All paths are absolute."""

    format_version: Literal[2] = 2
    # Only megatron-core reads its checkpoints, and only the trainer may import it: so the trainer exports too.
    task: Literal["train", "export"] = Field(description="train a model, or write a checkpoint as an HF directory")
    fingerprint: str = Field(description="identity of the training; a checkpoint of another one is refused")
    hf_dir: Path = Field(description="HF directory with config.json and safetensors: where the weights come from")
    tokenized_dir: Location = Field(description="artifact of the tokenize stage, also in an object store")
    bins_dir: Location = Field(description="artifact of the plan_bins stage, also in an object store")
    features_dir: Location | None = Field(
        default=None,
        description="artifact of the encode_images stage, whose features are read instead of pixels; null: none",
    )
    adapter_dir: Path | None = Field(
        default=None, description="PEFT directory of the adapter that the training starts from; null: none"
    )
    base_digest: str = Field(
        default="", description="digest of the model in `hf_dir`; a checkpoint of adapters for another model is refused"
    )
    output_dir: Path = Field(
        description="gets checkpoints/, metrics.jsonl, result.json; hf/, and adapter/, when exporting"
    )
    checkpoint_dir: Path | None = Field(default=None, description="when exporting: the checkpoint to export")
    seq_len: int = Field(gt=0, description="number of tokens of a bin, from the plan")
    train: TrainConfig
    execution: TrainerExecution = TrainerExecution()
    num_threads: int = Field(default=0, ge=0, description="CPU threads per process; 0: the cores are shared evenly")

    def num_micro_batches(self, dp: int) -> int:
        """Return the micro batches per step of each data-parallel rank; layout.py checks that the division is exact."""
        return self.train.global_batch_size // dp


class EncodeRun(StrictModel):
    """The run.json of a job that encodes images once, for trainings with a frozen vision encoder; absolute paths."""

    format_version: Literal[2] = 2
    task: Literal["encode"] = "encode"
    hf_dir: Path = Field(description="HF directory with config.json and safetensors: where the weights come from")
    tokenized_dir: Location = Field(description="artifact of the tokenize stage, also in an object store")
    features_dir: Path = Field(description="has images/, which lists the images to encode; gets features/ and index/")
    output_dir: Path = Field(description="gets result.json")
    num_shards: int = Field(gt=0, description="shards to write")
    precision: Literal["float32", "bfloat16"] = Field(description="arithmetic of the encoder")
    dtype: FeatureType = Field(description="type of the stored numbers")
    execution: TrainerExecution = TrainerExecution()
    num_threads: int = Field(default=0, ge=0, description="CPU threads per process; 0: the cores are shared evenly")


class _Task(BaseModel):
    """The field of a run.json that tells which kind of job it describes."""

    task: str = ""


def parse_run(text: str) -> RunConfig | EncodeRun:
    """Parse the job of a run.json."""
    kind = EncodeRun if _Task.model_validate_json(text).task == "encode" else RunConfig
    return kind.model_validate_json(text)
