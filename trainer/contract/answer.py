"""The trainer's output and its readers: MetricsRow lines, held-out losses, TrainResult, a checkpoint's digests.

athanor.json               a checkpoint's record, with the xxh3 digests of the record and of each other small file
__0_0.distcp               the state of a rank, entry by entry
__0_0.distcp.xxh3          byte offset of each entry -> its digest; a small file
"""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash
from pydantic import ConfigDict, Field, ValidationError, model_validator

from dataset_builders.contracts.manifest import FileEntry
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import damaged
from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import StorePath
from trainer.contract.names import METRICS_JSONL

CHECKPOINT_RECORD = "athanor.json"
STATE_FILE, STATE_DIGESTS = ".distcp", ".xxh3"  # suffixes of file names
KEPT_ASIDE = "is kept aside as"  # in the trainer's line about a damaged checkpoint, which a person should see
_FILES, _OWN = "digests", "digest"  # keys of the record
_STEP_NAME = re.compile(r"step-(\d{6,})")
_PIECE = 16 << 20  # bytes
LAYERS = "layers_"  # prefix of the metrics that layers report


class MetricsRow(StrictModel):
    """One line of metrics.jsonl. Tracking records every field except `step` and `time_ms`, under its own name and in
    this order: MLflow's compare page begins with the first.

    After these fields come the metrics of each part of the model. The model's family names the parts:
    {part}_grad_norm, before clipping, None if the part is frozen; {part}_seconds, forward and backward;
    {part}_tflops, model TFLOP/s over all ranks, without padding. Then come the numbers that layers report:
    layers_{name}, as the loads of experts (trainer/parts/experts/part.py).
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


def digest_of(data: bytes) -> str:
    """Return the xxh3 digest of some bytes, in the form that checkpoints store."""
    return xxhash.xxh3_64_hexdigest(data)


def write_checkpoint_record(checkpoint: Path, record: dict[str, Any]) -> None:
    """Write athanor.json, with digests of the checkpoint's other small files."""
    small = (path for path in checkpoint.iterdir() if path.suffix != STATE_FILE and path.name != CHECKPOINT_RECORD)
    record = record | {_FILES: {path.name: digest_of(path.read_bytes()) for path in small}}
    write_json(checkpoint / CHECKPOINT_RECORD, record | {_OWN: _digest_of_record(record)})


def read_checkpoint_record(checkpoint: Path) -> dict[str, Any]:
    """Return the content of athanor.json, after checking all small files.

    Raises:
        DamagedFile: a file is damaged or missing, or the directory is named after another step.
    """
    try:
        record = json.loads((checkpoint / CHECKPOINT_RECORD).read_bytes())
        if record.pop(_OWN, None) != _digest_of_record(record):
            raise ValueError(f"{CHECKPOINT_RECORD} is not what was written")
        for name, digest in record[_FILES].items():
            if digest_of((checkpoint / name).read_bytes()) != digest:
                raise ValueError(f"{name} is not what was written")
        if (named := _STEP_NAME.fullmatch(checkpoint.name)) and record.get("step", int(named[1])) != int(named[1]):
            raise ValueError(f"it is the checkpoint of step {record['step']}")
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise damaged(checkpoint, f"is damaged ({error})") from error
    return record


def state_files(checkpoint: Path) -> list[Path]:
    """Return the files with the ranks' states that have digests in the checkpoint, sorted by name."""
    return sorted(path.with_suffix("") for path in checkpoint.glob(f"*{STATE_FILE}{STATE_DIGESTS}"))


def check_state_file(path: Path) -> str:
    """Compare each entry of a rank's state with its digest, and return the digest of the file of digests.

    Raises:
        DamagedFile: an entry differs from its digest, or the file is missing, cut or too long.
    """
    try:
        beside = path.with_name(path.name + STATE_DIGESTS).read_bytes()
        digests = {int(start): digest for start, digest in json.loads(beside).items()}
        starts = sorted(digests)
        with path.open("rb") as file:
            # An entry ends where the next one begins, so that no byte of the file is left out.
            for start, end in zip(starts, [*starts[1:], path.stat().st_size], strict=True):
                if _digest_of_part(file, start, end) != digests[start]:
                    raise ValueError(f"{path.name}: the {end - start} bytes at {start} are not what was written")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise damaged(path.parent, f"is damaged ({error})") from error
    return digest_of(beside)


def check_checkpoint(
    checkpoint: Path,
    digest: Callable[[Path, Callable[[Path], str]], str] = lambda path, read: read(path),
    fingerprint: str | None = None,
) -> None:
    """Check that every file of a checkpoint has the content that was written.

    Args:
        digest: calls its second argument with its first, unless it already knows the result.
        fingerprint: the fingerprint of the training that the checkpoint must be of; None: any.
    """
    record = read_checkpoint_record(checkpoint)
    if fingerprint not in (None, record["fingerprint"]):
        raise damaged(checkpoint, "is a checkpoint of another training")
    for path in state_files(checkpoint):
        digest(path, check_state_file)


def _digest_of_part(file: BinaryIO, start: int, end: int) -> str:
    """Return `digest_of` the bytes from `start` to `end`, read in pieces."""
    file.seek(start)
    digest = xxhash.xxh3_64()
    while piece := file.read(min(_PIECE, end - file.tell())):
        digest.update(piece)
    return digest.hexdigest()


def _digest_of_record(record: dict[str, Any]) -> str:
    return digest_of(json.dumps(record, sort_keys=True).encode())
