"""run_stage(): fingerprint -> directory -> reuse, or work in a scratch directory under a lock and publish.

    <root>/artifacts/<stage>/<fingerprint>/manifest.json ...   whole, never changed again
    <root>/scratch/<stage>-<fingerprint>/ ...                  unfinished; a rerun goes on in it
    <root>/scratch/<stage>-<fingerprint>.lock                  held by the process that works there

What identifies an artifact: the stage's name and VERSION, its identity config, its parents' fingerprints.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
from pydantic import BaseModel

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.fingerprint import describe_drift, fingerprint
from dataset_builders.contracts.manifest import MANIFEST, Manifest, Parent, ShardEntry, load_manifest
from dataset_builders.contracts.shard_io import remove_entries


@dataclass(frozen=True, slots=True)
class Artifact:
    """A committed output directory of a stage."""

    dir: Path
    manifest: Manifest

    @classmethod
    def load(cls, directory: Path) -> "Artifact":
        return cls(directory, load_manifest(directory))

    def parent(self) -> Parent:
        return Parent(name=self.manifest.stage, fingerprint=self.manifest.fingerprint)


@dataclass(frozen=True, slots=True)
class External:
    """An input that no stage made: a directory of the user's, known by a digest of its content."""

    dir: Path
    name: str
    digest: str

    def parent(self) -> Parent:
        return Parent(name=self.name, fingerprint=self.digest)


Input = Artifact | External


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage hands to the manifest, once its files lie in the work directory."""

    shards: list[ShardEntry] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its name, VERSION, and `run(config, inputs, work_dir, resources) -> StageOutput`.

    `run` must be able to go on from whatever an interrupted try of the same fingerprint left in `work_dir`.
    """

    name: str
    version: int
    run: Callable[..., StageOutput]


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a run of a stage gave, and what it cost."""

    artifact: Artifact
    reused: bool
    seconds: float


def stage_identity(stage: Stage, config: BaseModel, inputs: Mapping[str, Input]) -> dict[str, Any]:
    """Everything that decides the bytes of the output."""
    return {
        "stage": stage.name,
        "version": stage.version,
        "config": config.model_dump(mode="json"),
        "parents": {role: item.parent().model_dump() for role, item in inputs.items()},
    }


def artifact_dir(root: Path, stage: Stage, identity: Mapping[str, Any]) -> Path:
    """Where the artifact of this identity lies, or would lie."""
    return root / "artifacts" / stage.name / fingerprint(identity)


def scratch_dir(root: Path, stage: Stage, identity: Mapping[str, Any]) -> Path:
    """Where it is worked on."""
    return root / "scratch" / f"{stage.name}-{fingerprint(identity)}"


def run_stage(
    stage: Stage, config: BaseModel, inputs: Mapping[str, Input], root: Path, resources: object = None
) -> StageResult:
    """Reuse the finished artifact of this identity, or make it.

    Args:
        config: the identity config: frozen pydantic, JSON-serialisable.
        inputs: role -> artifact or external directory.
        resources: execution only; never part of the fingerprint.

    Raises:
        InputError: another process is making the same artifact now, or the disk is full.
    """
    started = time.perf_counter()
    identity = stage_identity(stage, config, inputs)
    final = artifact_dir(root, stage, identity)
    if (final / MANIFEST).is_file():
        return StageResult(Artifact.load(final), True, time.perf_counter() - started)
    work = scratch_dir(root, stage, identity)
    work.mkdir(parents=True, exist_ok=True)
    with _held(work):
        if not (final / MANIFEST).is_file():
            _make(stage, config, inputs, work, resources, identity, final)
    return StageResult(Artifact.load(final), False, time.perf_counter() - started)


def _make(stage, config, inputs, work: Path, resources, identity: dict[str, Any], final: Path) -> None:
    try:
        if not (work / MANIFEST).is_file():  # there when an earlier try ended just before the rename
            for left_over in work.rglob("*.tmp"):  # parts of files, of a try that was killed
                left_over.unlink()
            output = stage.run(config, inputs, work, resources)
            _manifest(stage, identity, output).write(work)
        remove_entries(work, [shard.name for shard in load_manifest(work).shards])
        final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(work, final)
    except OSError as error:
        if error.errno != 28:  # ENOSPC
            raise
        free = shutil.disk_usage(work).free
        raise InputError(
            f"disk full while {stage.name} wrote {work} ({free / 1e6:.0f} MB free); finished parts are kept: "
            "free space or choose another --root, then run the same command again"
        ) from error


def _manifest(stage: Stage, identity: Mapping[str, Any], output: StageOutput) -> Manifest:
    return Manifest(
        stage=stage.name,
        version=stage.version,
        fingerprint=fingerprint(identity),
        config=identity["config"],
        parents=identity["parents"],
        shards=output.shards,
        skips=output.skips,
        stats=output.stats,
    )


class _held:
    """The lock of a scratch directory, taken without waiting; says who has it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.owner = work.with_name(work.name + ".owner.json")
        self.lock = filelock.FileLock(work.with_name(work.name + ".lock"), blocking=False)

    def __enter__(self) -> None:
        try:
            self.lock.acquire()
        except filelock.Timeout as error:
            who = json.loads(self.owner.read_text()) if self.owner.is_file() else {}
            raise InputError(
                f"{self.work} is being made by process {who.get('pid', '?')} on {who.get('host', '?')}; "
                "wait for it to end and run the same command again, or choose another --root"
            ) from error
        self.owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def __exit__(self, *_: object) -> None:
        self.owner.unlink(missing_ok=True)
        self.lock.release()


def why_rebuild(root: Path, stage: Stage, identity: Mapping[str, Any]) -> str:
    """In words: why no artifact of this identity is there, told against the newest one of the same stage."""
    if scratch_dir(root, stage, identity).is_dir():
        return "unfinished: an earlier run was interrupted, its finished parts will be used"
    made = [d for d in (root / "artifacts" / stage.name).glob("*") if (d / MANIFEST).is_file()]
    if not made:
        return "never made in this root"
    newest = load_manifest(max(made, key=lambda d: (d / MANIFEST).stat().st_mtime))
    old = {"version": newest.version, **newest.config, **_parent_fields(newest.parents)}
    parents = {role: Parent.model_validate(p) for role, p in identity["parents"].items()}
    new = {"version": identity["version"], **identity["config"], **_parent_fields(parents)}
    return describe_drift(old, new)


def _parent_fields(parents: Mapping[str, Parent]) -> dict[str, str]:
    return {f"input {role}": f"{p.name}@{p.fingerprint[:8]}" for role, p in parents.items()}
