"""The directory of a run's checkpoints: their names, records and disk space.

step-000500/athanor.json   the record of the checkpoint, read before anything else; written last
step-000500/...            model, optimizer states, main parameters, RNG (dist_checkpointing), digests
saving-step-000500/        an unfinished save; deleted at the next start
deleting-step-000500/      an unfinished deletion; deleted at the next start
damaged-step-000500/       a checkpoint that was found damaged at a start; kept for a person, never read or deleted
"""

import math
import shutil
from pathlib import Path

from dataset_builders.contracts.manifest import describe_drift
from dataset_builders.errors import InputError
from dataset_builders.storage.store import DOOMED, rename_doomed
from trainer.contract.checkpoint import checkpoints_by_step, list_checkpoints, read_checkpoint_record
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import RunConfig

FORMAT_VERSION = 2  # 2: with RNG states


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def newest_path(directory: Path) -> Path | None:
    """Return the newest checkpoint, whole or not; None if there is none."""
    return max(checkpoints_by_step(directory), default=(0, None))[1]


def rename_damaged(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing reads it again, and return its new path."""
    names = [f"damaged-{checkpoint.name}", *(f"damaged-{checkpoint.name}-{n}" for n in range(2, 1000))]
    aside = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    return checkpoint.rename(aside)


def read_step(checkpoint: Path, run: RunConfig) -> int:
    """Return the step of a checkpoint, after checking that it belongs to this run."""
    meta = read_checkpoint_record(checkpoint)
    if meta["format_version"] != FORMAT_VERSION:
        raise InputError(
            f"{checkpoint}: format_version is {meta['format_version']}, this code reads {FORMAT_VERSION}; delete it"
        )
    base = meta.get("base")  # only a checkpoint of adapters has it
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


def lacks_space_for_run(run: RunConfig, size: int, step: int) -> str | None:
    """Return a message if the disk has no room for all checkpoints, of `size` bytes each, that will exist at a time;
    None if it has room. The run begins at `step`."""
    config, num_steps = run.execution.checkpoint, run.train.num_steps
    interval, directory = config.save_interval, run.output_dir / CHECKPOINTS
    to_come = -(-num_steps // interval) - step // interval
    # A checkpoint is kept for good if it is saved at all, so at multiples of both intervals.
    kept = config.keep_last + (num_steps // math.lcm(interval, config.keep_every) if config.keep_every else 0)
    # One more than are kept: an old checkpoint is deleted only when the new one is whole.
    more = min(to_come, max(1, kept + 1 - len(list_checkpoints(directory))))
    return lacks_space(directory, more * size, f"{more} checkpoints more, as many as there are at a time")


def lacks_space(directory: Path, wanted: int, what: str) -> str | None:
    """Return a message if the directory's disk has fewer free bytes than wanted; None if it has enough."""
    free = shutil.disk_usage(directory).free
    if free >= wanted:
        return None
    return (
        f"{directory}: {wanted / 1e9:,.3f} GB are wanted for {what} and {free / 1e9:,.3f} GB are free; free space, "
        "choose another root, or lower execution.checkpoint.keep_last"
    )


def delete(checkpoint: Path) -> None:
    """Rename and delete a checkpoint. Files that cannot be deleted now are deleted at the next start."""
    shutil.rmtree(rename_doomed(checkpoint), ignore_errors=True)


def delete_leftovers(directory: Path) -> None:
    for leftover in (*directory.glob("saving-*"), *directory.glob(f"{DOOMED}*")):
        shutil.rmtree(leftover)
