"""The files that a training writes: the lines of metrics.jsonl, the losses of held-out samples, result.json."""

import contextlib
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from dataset_builders.contracts.manifest import FileEntry
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.store import StorePath
from trainer.contract.names import METRICS_JSONL

LAYERS = "layers_"  # prefix of the metrics that layers report


class MetricsRow(StrictModel):
    """One line of metrics.jsonl. Tracking records every field except `step` and `time_ms`, under its own name and in
    this order: MLflow's compare page begins with the first.

    After these fields come the metrics of each part of the model. The model's family names the parts:
    {part}_grad_norm, before clipping, None if the part is frozen; {part}_seconds, forward and backward;
    {part}_tflops, model TFLOP/s over all ranks, without padding. Then come the numbers that layers report:
    layers_{name}, as the loads of experts (trainer/parts/experts/part.py).

    A field that is added later has a default, or older lines would be taken for lines that a crash has cut short.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, float | None]

    step: int
    time_ms: int | None = Field(default=None, description="time of writing, milliseconds since 1970; None before")
    loss: float = Field(description="mean over the loss tokens of the global batches since the last line")
    heldout_loss: float | None = Field(default=None, description="mean over the loss tokens of the held-out bins")
    mtp_loss: float | None = Field(
        default=None,
        description="mean loss of the tokens after the next in the same global batches, without its factor; None if "
        "multi-token prediction is not trained",
    )
    grad_norm: float = Field(description="gradient norm over all ranks, before clipping")
    param_norm: float = Field(description="norm of all parameters, trained and frozen, after the step")
    lr: float = Field(description="scheduled rate for optim.lr; a part's own rate is in proportion to it")
    epoch: float = Field(description="passes over the bins so far")
    tokens: int = Field(description="tokens trained on so far, without padding")
    loss_tokens: int = Field(description="loss tokens trained on so far")
    padding_fraction: float = Field(description="padding / capacity of the bins since the last line")
    tokens_per_second: float = Field(description="tokens over all ranks, without padding")
    step_seconds: float
    data_seconds: float = Field(description="time spent waiting for the loader")
    optimizer_seconds: float = Field(description="gradient reduction and update")
    mfu: float | None = Field(default=None, description="model FLOP/s over the devices' peak; None if that is unknown")
    memory_gb: float = Field(
        description="peak of the device memory that torch holds on rank 0, or resident memory on a CPU; 1e9 bytes"
    )

    @model_validator(mode="after")
    def _others_are_of_parts(self) -> "MetricsRow":
        of_parts = ("_grad_norm", "_seconds", "_tflops")
        unknown = [name for name in self.model_extra if not name.endswith(of_parts) and not name.startswith(LAYERS)]
        if unknown:
            raise ValueError(f"{unknown[0]} is neither a field nor a number of a part or of layers")
        return self


def parse_metrics(lines: bytes) -> list[MetricsRow]:
    """Parse lines of metrics.jsonl, without the lines that a crash has cut short."""
    rows = []
    for line in lines.splitlines():
        with contextlib.suppress(ValidationError):
            rows.append(MetricsRow.model_validate_json(line))
    return rows


def read_metrics(directory: StorePath) -> list[MetricsRow]:
    """Return the rows of a directory's metrics.jsonl in order, the last written of each step; empty without a file."""
    path = directory / METRICS_JSONL
    rows = parse_metrics(path.read_bytes()) if path.is_file() else []
    return [row for _, row in sorted({row.step: row for row in rows}.items())]


class HeldoutRow(StrictModel):
    """One line of heldout.jsonl or heldout-base.jsonl: the loss of a held-out sample."""

    key: str
    loss: float | None = Field(description="mean over its loss tokens; None if it has none")
    loss_tokens: int


def read_heldout(path: StorePath) -> list[HeldoutRow]:
    """Return the rows of a heldout.jsonl, in the order of their keys; empty without a file."""
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
    files: list[FileEntry] = Field(default=[], description="the weight files that an export wrote")
