"""Damages to files of a finished root, from a seeded generator, and the check that detects each of them."""

import logging
import os
import random
import shutil
from pathlib import Path

from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.errors import InputError
from stages.shared.artifacts.artifact import Artifact, Stage
from stages.shared.artifacts.run_stage import _reused
from stages.shared.artifacts.verify import check_written
from stages.train.stage import STAGE as TRAIN

KINDS = ("bit", "cut", "longer", "removed", "swapped", "manifest of another")


def files_of(directory: Path) -> list[Path]:
    """Return the files of an artifact that hold something and that a stage or a user's model reads: all except pages,
    reports and logs."""
    manifest = load_manifest(directory)
    names = ["manifest.json", *(entry.name for entry in (*manifest.files, *manifest.shards))]
    if manifest.stage == "train":
        names += [str(path.relative_to(directory)) for path in (directory / manifest.stats["checkpoint"]).iterdir()]
    return [path for path in (directory / name for name in names) if path.stat().st_size]


def damage(rng: random.Random, kind: str, path: Path, directory: Path) -> Path:
    """Damage a file and return its path. If the file is hard-linked, only this name gets the damaged content."""
    data = bytearray(path.read_bytes())
    others = [file for file in files_of(directory) if file != path and file.read_bytes() != data]
    path.unlink()
    if kind == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind == "longer":
        data += rng.randbytes(rng.randrange(1, 600))
    elif kind == "swapped" and others:
        data = rng.choice(others).read_bytes()
    elif kind == "manifest of another":
        path.write_bytes(data)
        path = directory / "manifest.json"
        stranger = rng.choice([place for place in directory.parents[1].glob("*/*") if place != directory])
        data = (stranger / "manifest.json").read_bytes()
        path.unlink()
    else:  # removed
        return path
    path.write_bytes(data)
    return path


def seen(directory: Path, caplog) -> str:
    """Return the line that reports the damage when the artifact is reused, read or asked; "" if no line does."""
    caplog.clear()
    stage = TRAIN if directory.parent.name == "train" else Stage(directory.parent.name, 1, lambda *_: None)
    try:
        found = _reused(stage, directory, directory / "beside", logging.WARNING)
        if found is None:
            return caplog.text
        for shard in found.manifest.shards:
            list(iter_records(directory / shard.name, shard))
    except InputError as error:
        line = str(error)
        if (directory / "hf").is_dir() and "/hf/" in line:
            try:
                check_written(directory / "hf")
            except InputError as told:
                return str(told)
            return ""
        return line
    return ""


def account(number: int, root: Path, spare: Path, caplog) -> tuple[str, str, str]:
    """Return (stage, kind of damage, line) of one damage, and restore the root."""
    rng = random.Random(f"damage {number}")
    directory = rng.choice(sorted(root.glob("artifacts/*/*")))
    kind, path = KINDS[number % len(KINDS)], rng.choice(files_of(directory))
    assert seen(directory, caplog) == "", directory
    kept = Path(shutil.copytree(directory, spare / "kept", copy_function=os.link))
    try:
        spoilt = damage(rng, kind, path, directory)
        line = seen(directory, caplog)
        name = spoilt.parent.name if spoilt.parent.parent.name == "checkpoints" else spoilt.name
        assert name in line, (number, kind, spoilt, line)
    finally:
        shutil.rmtree(directory)
        kept.rename(directory)
    Artifact.load(directory)
    return directory.parent.name, kind, line
