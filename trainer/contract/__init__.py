"""What the trainer is told (RunConfig in run.json) and what it answers (MetricsRow lines, TrainResult).

To add a hyperparameter: a field here with its bounds and one line of description, the code that reads it,
a value in the recipes if it is a decision. The command line, the form and the tracking follow by themselves.
"""

import contextlib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from dataset_builders.contracts.store import Location, StorePath
from dataset_builders.contracts.strict import StrictModel
from trainer.contract.parallel import ParallelConfig

RUN_JSON = "run.json"
RESULT_JSON = "result.json"
METRICS_JSONL = "metrics.jsonl"
HELDOUT_JSONL = "heldout.jsonl"  # the newest measurement
HELDOUT_BASE_JSONL = "heldout-base.jsonl"  # before the first step
CHECKPOINTS = "checkpoints"
HF_EXPORT = "hf"
PROFILE = "profile"  # the folder of traces

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL: told to stop, saved; start it again and it goes on

IGNORE_INDEX = -100


class OptimConfig(StrictModel):
    """AdamW with a linear warmup and a cosine decay. No weight decay on norms and biases."""

    lr: float = Field(gt=0, le=1, description="peak learning rate")
    min_lr_fraction: float = Field(ge=0, le=1, description="learning rate at the last step, as a fraction of the peak")
    warmup_steps: int = Field(ge=0, description="steps of linear warmup from 0 to the peak")
    weight_decay: float = Field(ge=0, le=1, description="decoupled weight decay")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(default=1e-8, gt=0, description="term added to the denominator")
    clip_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this global norm")


class PartConfig(StrictModel):
    """How one part of the model is trained: the vision encoder, its mergers, or the language model."""

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


class TrainConfig(StrictModel):
    """Identity: everything that changes the trained weights or the recorded metrics."""

    seed: int = Field(ge=0, description="order of the bins")
    num_steps: int = Field(gt=0, description="optimizer updates")
    global_batch_size: int = Field(gt=0, description="bins between two optimizer updates, over all data-parallel ranks")
    precision: Literal["float32", "bfloat16", "float8"] = Field(
        description="arithmetic of forward and backward; main weights and gradients are float32 in all. float8: "
        "the matrix products of the language model's layers, the rest in bfloat16; needs Hopper or newer"
    )
    heldout_interval: int = Field(gt=0, description="steps between two measurements of the held-out loss")
    optim: OptimConfig
    vision: PartConfig = Field(default=PartConfig(), description="the vision encoder without its mergers")
    merger: PartConfig = Field(default=PartConfig(), description="what makes image tokens of it, deepstack's included")
    language: PartConfig = Field(default=PartConfig(), description="the language model with its embeddings")

    @property
    def parts(self) -> dict[str, PartConfig]:
        """The parts of the model by name."""
        return {"vision": self.vision, "merger": self.merger, "language": self.language}

    @model_validator(mode="after")
    def _something_is_trained(self) -> "TrainConfig":
        if all(part.frozen for part in self.parts.values()):
            names = ", ".join(f"{name}.frozen" for name in self.parts)
            raise ValueError(f"{names} are all true: nothing is left to train; make one of them false")
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> "TrainConfig":
        if self.optim.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of num_steps={self.num_steps}; "
                f"try optim.warmup_steps={self.num_steps // 10}"
            )
        return self


class CheckpointConfig(StrictModel):
    """Execution: when to save and what to keep."""

    save_interval: int = Field(default=200, gt=0, description="steps between two checkpoints; the last is always saved")
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    keep_every: int | None = Field(
        default=None, ge=1, description="checkpoints of steps that this divides are kept for good; null: none"
    )
    asynchronous: bool = Field(
        default=False, description="write the files in a process of their own while training goes on"
    )


class ProfileConfig(StrictModel):
    """Execution: which steps of a training torch.profiler traces. A training that is finished is reused, untraced."""

    first_step: int = Field(default=5, ge=1, description="the first that is traced, counted from 1")
    num_steps: int = Field(default=2, ge=1, le=20, description="steps that are traced; each may take 100 MB of memory")
    rank: int = Field(default=0, ge=0, description="process that is traced")


class RunConfig(StrictModel):
    """run.json: one job of the trainer, whole. All paths are absolute."""

    format_version: Literal[1] = 1
    task: Literal["train", "export"] = Field(description="train a model, or write a checkpoint as an HF directory")
    fingerprint: str = Field(description="identity of the training; a checkpoint of another one is refused")
    hf_dir: Path = Field(description="HF directory with config.json and safetensors: where the weights come from")
    tokenized_dir: Location = Field(description="artifact of the tokenize stage, also in an object store")
    bins_dir: Location = Field(description="artifact of the plan_bins stage, also in an object store")
    output_dir: Path = Field(description="gets checkpoints/, metrics.jsonl, result.json; hf/ when exporting")
    checkpoint_dir: Path | None = Field(default=None, description="when exporting: the checkpoint to export")
    seq_len: int = Field(gt=0, description="tokens a bin holds, from the plan")
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loader_workers: int = Field(default=2, ge=1, description="threads of a process that read micro batches ahead")
    cuda_graphs: bool = Field(
        default=True, description="launch the language layers as CUDA graphs where that is possible"
    )
    log_interval: int = Field(default=1, gt=0, description="steps between two lines of metrics.jsonl")
    profile: ProfileConfig | None = Field(default=None, description="steps to trace into profile/; null: none")
    num_threads: int = Field(default=0, ge=0, description="CPU threads of a process; 0 shares the cores among them")

    def num_micro_batches(self, dp: int) -> int:
        """Micro batches a data-parallel rank runs per step; layout.py has seen that the ranks get as many."""
        return self.train.global_batch_size // dp


class MetricsRow(StrictModel):
    """One line of metrics.jsonl. Everything but `step` and `time_ms` is forwarded to tracking under its own name, in
    this order: MLflow's compare page begins with the first."""

    step: int
    time_ms: int | None = Field(
        default=None, description="when the line was written, milliseconds since 1970; None in old files"
    )
    loss: float = Field(description="mean over the loss tokens of the global batches since the last line")
    heldout_loss: float | None = Field(default=None, description="the same over the held-out bins")
    grad_norm: float = Field(description="over all ranks, before clipping")
    vision_grad_norm: float | None = Field(default=None, description="of the vision encoder; None where it is frozen")
    merger_grad_norm: float | None = Field(default=None, description="of the mergers; None where they are frozen")
    language_grad_norm: float | None = Field(default=None, description="of the language model; None where it is frozen")
    lr: float = Field(description="of optim.lr; a part with a rate of its own is in proportion")
    epoch: float = Field(description="passes over the bins so far")
    tokens: int = Field(description="tokens trained on so far, without padding")
    loss_tokens: int = Field(description="loss tokens trained on so far")
    padding_fraction: float = Field(description="padding / capacity of the bins since the last line")
    tokens_per_second: float = Field(description="over all ranks, without padding")
    step_seconds: float
    data_seconds: float = Field(description="waiting for the loader")
    vision_seconds: float = Field(description="vision encoder, forward and backward")
    language_seconds: float = Field(description="language model and loss, forward and backward")
    optimizer_seconds: float = Field(description="gradient reduction and update")
    vision_tflops: float = Field(description="model TFLOP/s of the vision encoder, all ranks, padding not counted")
    language_tflops: float = Field(description="the same of the language model")
    mfu: float | None = Field(default=None, description="model FLOP/s over the peak of the devices; None where unknown")
    memory_gb: float = Field(description="peak device memory of rank 0, or resident memory on CPU, in 1e9 bytes")


def parse_metrics(lines: bytes) -> list[MetricsRow]:
    """The rows of some lines of metrics.jsonl; a line that was cut by a crash is passed over."""
    rows = []
    for line in lines.splitlines():
        with contextlib.suppress(ValidationError):
            rows.append(MetricsRow.model_validate_json(line))
    return rows


def read_metrics(directory: StorePath) -> list[MetricsRow]:
    """The rows of a directory's metrics.jsonl, one a step (the last written), in order; none without a file."""
    path = directory / METRICS_JSONL
    rows = parse_metrics(path.read_bytes()) if path.is_file() else []
    return [row for _, row in sorted({row.step: row for row in rows}.items())]


class HeldoutRow(StrictModel):
    """One line of heldout.jsonl or heldout-base.jsonl: a held-out sample."""

    key: str
    loss: float | None = Field(description="mean over its loss tokens; None where it has none")
    loss_tokens: int


def read_heldout(path: StorePath) -> list[HeldoutRow]:
    """The rows of a heldout.jsonl, in order of their keys; none without a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [HeldoutRow.model_validate_json(line) for line in lines]


class TrainResult(StrictModel):
    """result.json: how the job ended."""

    status: Literal["finished", "stopped", "failed"]
    step: int = Field(description="last completed step")
    checkpoint: str | None = Field(default=None, description="newest checkpoint, relative to output_dir")
    message: str = Field(default="", description="one line for a person: what went wrong and the way out")
    keys: list[str] = Field(default=[], description="samples of the step that failed")
    is_input_error: bool = Field(default=False, description="failed because of the config or an input: do not retry")
    loss: float | None = None
    heldout_loss: float | None = None
