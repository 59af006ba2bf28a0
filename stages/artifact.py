"""run_stage(): fingerprint -> directory -> reuse, or work in a scratch directory under a lock and publish.

    <root>/artifacts/<stage>/<fingerprint>/manifest.json ...   whole, never changed again
    <root>/scratch/<stage>-<fingerprint>/ ...                  unfinished; a rerun goes on in it
    <root>/scratch/<stage>-<fingerprint>.lock                  held by the process that works there

What identifies an artifact: the stage's name and VERSION, its identity config, its parents' fingerprints.

A root may be the URL of an object store, which has no rename. There a stage that writes file by file works in the
artifact's own directory: finished files appear one by one, the manifest last. A stage that needs a disk (`on_disk`)
works below `side_dir(root)` on this machine, and what it made is uploaded, again the manifest last. The lock then holds
on one machine; two machines that make the same data artifact write the same bytes.
"""

import json
import logging
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
from dataset_builders.contracts.store import StorePath, is_local, make_dir, modified, side_dir, upload_dir

LOCK_POLL_SECONDS = 0.5
log = logging.getLogger("athanor.stage")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A committed output directory of a stage."""

    dir: StorePath
    manifest: Manifest

    @classmethod
    def load(cls, directory: StorePath) -> "Artifact":
        return cls(directory, load_manifest(directory))

    def parent(self) -> Parent:
        return Parent(name=self.manifest.stage, fingerprint=self.manifest.fingerprint)


@dataclass(frozen=True, slots=True)
class External:
    """An input that no stage made: a directory of the user's, known by a digest of its content."""

    dir: StorePath
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

    Attributes:
        on_disk: `work_dir` must be a directory of this machine, because other programs write there; without it `run`
            writes whole files only (`atomic_path`, `ShardWriter`), which may as well go to an object store.
    """

    name: str
    version: int
    run: Callable[..., StageOutput]
    on_disk: bool = False


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


def artifact_dir(root: StorePath, stage: Stage, identity: Mapping[str, Any]) -> StorePath:
    """Where the artifact of this identity lies, or would lie."""
    return root / "artifacts" / stage.name / fingerprint(identity)


def scratch_dir(root: StorePath, stage: Stage, identity: Mapping[str, Any]) -> StorePath:
    """Where it is worked on."""
    if is_local(root) or stage.on_disk:
        return side_dir(root) / "scratch" / f"{stage.name}-{fingerprint(identity)}"
    return artifact_dir(root, stage, identity)


def run_stage(
    stage: Stage, config: BaseModel, inputs: Mapping[str, Input], root: StorePath, resources: object = None
) -> StageResult:
    """Reuse the finished artifact of this identity, or make it; while another process makes it, wait for that one.

    Args:
        config: the identity config: frozen pydantic, JSON-serialisable.
        inputs: role -> artifact or external directory.
        resources: execution only; never part of the fingerprint.

    Raises:
        InputError: the disk is full.
    """
    started = time.perf_counter()
    identity = stage_identity(stage, config, inputs)
    final = artifact_dir(root, stage, identity)
    if (final / MANIFEST).is_file():
        return StageResult(Artifact.load(final), True, time.perf_counter() - started)
    work = scratch_dir(root, stage, identity)
    lock = side_dir(root) / "scratch" / f"{stage.name}-{fingerprint(identity)}"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with _held(work, lock):
        is_made = (final / MANIFEST).is_file()  # by the one that was waited for
        if not is_made:
            make_dir(work)
            _make(stage, config, inputs, work, resources, identity)
            _publish(work, final)
    return StageResult(Artifact.load(final), is_made, time.perf_counter() - started)


def _make(stage, config, inputs, work: StorePath, resources, identity: dict[str, Any]) -> None:
    try:
        if not (work / MANIFEST).is_file():  # there when an earlier try ended just before the rename
            if is_local(work):
                for left_over in work.rglob("*.tmp"):  # parts of files, of a try that was killed
                    left_over.unlink()
            output = stage.run(config, inputs, work, resources)
            if is_local(work):
                _manifest(stage, identity, output).write(work)
            else:  # the manifest publishes, so that the records beside the shards go first
                remove_entries(work, [shard.name for shard in output.shards])
                _manifest(stage, identity, output).write(work)
    except OSError as error:
        if error.errno != 28:  # ENOSPC
            raise
        place = work if is_local(work) else side_dir(work)
        raise InputError(
            f"disk full while {stage.name} wrote {place} ({_free(place) / 1e6:.0f} MB free); finished parts are kept: "
            "free space or choose another --root, then run the same command again"
        ) from error


def _publish(work: StorePath, final: StorePath) -> None:
    """Bring a finished work directory to its place."""
    if not is_local(work):
        return
    remove_entries(work, [shard.name for shard in load_manifest(work).shards])
    if is_local(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(work, final)
    else:
        upload_dir(work, final, MANIFEST)
        shutil.rmtree(work)


def _free(place: Path) -> int:
    return shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free


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
    """The lock of a scratch directory. Whoever finds it taken waits for it, and says for whom."""

    def __init__(self, work: StorePath, name: Path) -> None:
        self.work = work
        self.owner = name.with_name(name.name + ".owner.json")
        self.lock = filelock.FileLock(name.with_name(name.name + ".lock"))

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            who = json.loads(self.owner.read_text()) if self.owner.is_file() else {}
            log.warning(
                "%s is being made by process %s on %s; waiting for it to end",
                self.work,
                who.get("pid", "?"),
                who.get("host", "?"),
            )
            self.lock.acquire(poll_interval=LOCK_POLL_SECONDS)
        self.owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def __exit__(self, *_: object) -> None:
        self.owner.unlink(missing_ok=True)
        self.lock.release()


def why_rebuild(root: StorePath, stage: Stage, identity: Mapping[str, Any]) -> str:
    """In words: why no artifact of this identity is there, told against the newest one of the same stage."""
    if scratch_dir(root, stage, identity).is_dir():  # in a store a prefix that holds something
        return "unfinished: an earlier run was interrupted, its finished parts will be used"
    made = [d for d in (root / "artifacts" / stage.name).glob("*") if (d / MANIFEST).is_file()]
    if not made:
        return "never made in this root"
    newest = load_manifest(max(made, key=lambda d: modified(d / MANIFEST)))
    old = {"version": newest.version, **newest.config, **_parent_fields(newest.parents)}
    parents = {role: Parent.model_validate(p) for role, p in identity["parents"].items()}
    new = {"version": identity["version"], **identity["config"], **_parent_fields(parents)}
    return describe_drift(old, new)


def _parent_fields(parents: Mapping[str, Parent]) -> dict[str, str]:
    return {f"input {role}": f"{p.name}@{p.fingerprint[:8]}" for role, p in parents.items()}
