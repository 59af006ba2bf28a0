"""The directory of a run's checkpoints: names, records, which are kept, and the room that they take.

step-000500/athanor.json   what it is, read before anything else; written last
step-000500/...            model, optimizer states, main parameters, RNG (dist_checkpointing), digests
saving-step-000500/        a save that has not ended; deleted at the next start
deleting-step-000500/      a deletion that has not ended; deleted at the next start
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from dataset_builders.contracts.fingerprint import describe_drift
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from trainer.checkpoint.writer import digest_of
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import CheckpointConfig, RunConfig

FORMAT_VERSION = 2  # 2: with RNG states
META = "athanor.json"
_NAME = re.compile(r"step-(\d{6,})")
_DIGESTS, _OWN_DIGEST = "digests", "digest"  # of the small files; of the record itself


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    steps = [(int(m[1]), p) for p in directory.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(steps) if (path / META).is_file()]


def write_record(checkpoint: Path, record: dict[str, Any]) -> None:
    """Write athanor.json, with digests of the small files; those of the large ones' entries are in small ones."""
    small = (path for path in checkpoint.iterdir() if path.suffix != ".distcp")
    record = record | {_DIGESTS: {path.name: digest_of(path.read_bytes()) for path in small}}
    write_json(checkpoint / META, record | {_OWN_DIGEST: _digest_of(record)})


def read_record(checkpoint: Path) -> dict[str, Any]:
    """athanor.json, after a check of all that is small. A checkpoint of before digests is taken as it is.

    Raises:
        InputError: a file is damaged or missing.
    """
    try:
        record = json.loads((checkpoint / META).read_bytes())
        if _OWN_DIGEST in record and record.pop(_OWN_DIGEST) != _digest_of(record):
            raise ValueError(f"{META} is not what was written")
        for name, digest in record.get(_DIGESTS, {}).items():
            if digest_of((checkpoint / name).read_bytes()) != digest:
                raise ValueError(f"{name} is not what was written")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{checkpoint} is damaged ({error}); delete it, and the run goes on from the one before"
        ) from error
    return record


def _digest_of(record: dict[str, Any]) -> str:
    return digest_of(json.dumps(record, sort_keys=True).encode())


def read_step(checkpoint: Path, run: RunConfig) -> int:
    """The step of a checkpoint, after a check that it belongs to this run.

    Raises:
        InputError: the checkpoint is damaged, has another format, or belongs to another base model or training config.
    """
    meta = read_record(checkpoint)
    if meta["format_version"] != FORMAT_VERSION:
        raise InputError(
            f"{checkpoint}: format_version is {meta['format_version']}, this code reads {FORMAT_VERSION}; delete it"
        )
    base = meta.get("base")  # of a checkpoint of adapters
    if base is not None and base["digest"] != run.base_digest:
        raise InputError(
            f"{checkpoint} holds adapters of the base model {base['hf_dir']} ({base['digest']}), and this run's is "
            f"{run.hf_dir} ({run.base_digest}); set model to the first, or delete the checkpoint to begin anew"
        )
    if meta["fingerprint"] != run.fingerprint:
        drift = describe_drift(meta["train"], run.train.model_dump(mode="json")) or "its data or its base model"
        raise InputError(
            f"{checkpoint} belongs to another training ({drift}); choose another output directory or delete it"
        )
    return meta["step"]


def not_kept(directory: Path, config: CheckpointConfig) -> list[Path]:
    """The checkpoints that may go."""
    every = config.keep_every
    return [p for p in list_checkpoints(directory)[: -config.keep_last] if every is None or _step_of(p) % every]


def missing_room(run: RunConfig, size: int, step: int) -> str | None:
    """What to tell if the disk has no room for all checkpoints that will be there at a time; None if it has.

    Args:
        size: bytes of a checkpoint.
        step: at which the run begins.
    """
    config, num_steps = run.execution.checkpoint, run.train.num_steps
    interval, directory = config.save_interval, run.output_dir / CHECKPOINTS
    to_come = -(-num_steps // interval) - step // interval
    kept = config.keep_last + (num_steps // math.lcm(interval, config.keep_every) if config.keep_every else 0)
    more = min(to_come, max(1, kept + 1 - len(list_checkpoints(directory))))
    return too_little(directory, more * size, f"{more} checkpoints more, as many as there are at a time")


def too_little(directory: Path, wanted: int, what: str) -> str | None:
    """What to tell if the directory's disk has fewer bytes free than that; None if it has them."""
    free = shutil.disk_usage(directory).free
    if free >= wanted:
        return None
    return (
        f"{directory}: {wanted / 1e9:,.3f} GB are wanted for {what} and {free / 1e9:,.3f} GB are free; free space, "
        "choose another root, or lower execution.checkpoint.keep_last"
    )


def _step_of(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name)[1])


def delete(checkpoint: Path) -> None:
    """Rename first: a deletion that is cut short must leave nothing that looks like a whole checkpoint."""
    doomed = checkpoint.with_name(f"deleting-{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # what is left is deleted at the next start


def delete_leftovers(directory: Path) -> None:
    """Delete what saves and deletions that were cut short have left."""
    for leftover in (*directory.glob("saving-*"), *directory.glob("deleting-*")):
        shutil.rmtree(leftover)
