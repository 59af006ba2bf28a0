"""The trainer's output: MetricsRow lines, held-out losses, TrainResult; and how they are read."""

import contextlib
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from dataset_builders.contracts.manifest import FileEntry
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.store import StorePath
from trainer.contract.names import METRICS_JSONL


class MetricsRow(StrictModel):
    """One line of metrics.jsonl. Everything but `step` and `time_ms` goes to tracking under its own name and in this
    order: MLflow's compare page begins with the first.

    After these come the numbers of each part of the model, which its family names:
    {part}_grad_norm, before clipping, None if the part is frozen; {part}_seconds, forward and backward;
    {part}_tflops, model TFLOP/s over all ranks, without padding.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, float | None]

    step: int
    time_ms: int | None = Field(default=None, description="time of writing, milliseconds since 1970; None in old files")
    loss: float = Field(description="mean over the loss tokens of the global batches since the last line")
    heldout_loss: float | None = Field(default=None, description="the same over the held-out bins")
    grad_norm: float = Field(description="over all ranks, before clipping")
    param_norm: float | None = Field(
        default=None, description="of all parameters, trained and frozen, after the step; None in old files"
    )
    lr: float = Field(description="the schedule of optim.lr; a part's own rate is in proportion")
    epoch: float = Field(description="passes over the bins so far")
    tokens: int = Field(description="tokens trained on so far, without padding")
    loss_tokens: int = Field(description="loss tokens trained on so far")
    padding_fraction: float = Field(description="padding / capacity of the bins since the last line")
    tokens_per_second: float = Field(description="over all ranks, without padding")
    step_seconds: float
    data_seconds: float = Field(description="time spent waiting for the loader")
    optimizer_seconds: float = Field(description="gradient reduction and update")
    mfu: float | None = Field(default=None, description="model FLOP/s over the devices' peak; None if that is unknown")
    memory_gb: float = Field(
        description="peak of the device memory that torch holds on rank 0, or resident memory on a CPU; 1e9 bytes"
    )

    @model_validator(mode="after")
    def _others_are_of_parts(self) -> "MetricsRow":
        unknown = [name for name in self.model_extra if not name.endswith(("_grad_norm", "_seconds", "_tflops"))]
        if unknown:
            raise ValueError(f"{unknown[0]} is neither a field nor a number of a part")
        return self


def parse_metrics(lines: bytes) -> list[MetricsRow]:
    """The rows of some lines of metrics.jsonl; a line that a crash has cut is skipped."""
    rows = []
    for line in lines.splitlines():
        with contextlib.suppress(ValidationError):
            rows.append(MetricsRow.model_validate_json(line))
    return rows


def read_metrics(directory: StorePath) -> list[MetricsRow]:
    """The rows of a directory's metrics.jsonl in order, one per step (the last written); empty without a file."""
    path = directory / METRICS_JSONL
    rows = parse_metrics(path.read_bytes()) if path.is_file() else []
    return [row for _, row in sorted({row.step: row for row in rows}.items())]


class HeldoutRow(StrictModel):
    """One line of heldout.jsonl or heldout-base.jsonl: a held-out sample."""

    key: str
    loss: float | None = Field(description="mean over its loss tokens; None if it has none")
    loss_tokens: int


def read_heldout(path: StorePath) -> list[HeldoutRow]:
    """The rows of a heldout.jsonl, in order of their keys; empty without a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [HeldoutRow.model_validate_json(line) for line in lines]


class TrainResult(StrictModel):
    """result.json: how the job ended."""

    status: Literal["finished", "stopped", "failed"]
    step: int = Field(description="last completed step")
    checkpoint: str | None = Field(default=None, description="newest checkpoint, relative to output_dir")
    message: str = Field(default="", description="one line for a person: the problem and the way out")
    keys: list[str] = Field(default=[], description="samples of the step that failed")
    is_input_error: bool = Field(default=False, description="failed because of the config or an input: do not retry")
    loss: float | None = None
    heldout_loss: float | None = None
    files: list[FileEntry] = Field(default=[], description="of an export: its files of weights")
