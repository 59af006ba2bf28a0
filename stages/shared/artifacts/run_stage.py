"""run_stage(): reuse the artifact of a fingerprint, or make it in a scratch directory under a lock and publish it.

    <root>/artifacts/<stage>/<fingerprint>/manifest.json ...   complete, never changed again
    <root>/scratch/<stage>-<fingerprint>/ ...                  unfinished; a rerun continues in it
    <root>/scratch/<stage>-<fingerprint>.lock                  held by the process that works there

A root may be the URL of an object store, which has no rename. There, a stage that writes file by file works in the
artifact's own directory: finished files appear one by one, the manifest last. A stage that needs a disk (`on_disk`)
works below `side_dir(root)` on this machine, and its files are then uploaded, again the manifest last. The lock works
only within one machine; two machines that make the same data artifact write the same bytes.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import filelock
from pydantic import BaseModel

from dataset_builders.contracts.manifest import MANIFEST, Manifest, describe_drift, drifted, fingerprint, load_manifest
from dataset_builders.contracts.shard_io import remove_entries
from dataset_builders.errors import DamagedFile, InputError, damaged
from dataset_builders.storage.files import check_directory, read_object, write_json, write_text
from dataset_builders.storage.store import StorePath, is_local, make_dir, modified, remove_tree, side_dir, upload_dir
from stages.shared.artifacts.artifact import (
    Artifact,
    Input,
    Stage,
    StageResult,
    artifact_dir,
    changed_inputs,
    stage_identity,
)
from stages.shared.artifacts.verify import DigestCache, check_inputs, check_reused, file_entries
from stages.shared.artifacts.workers import StageResources
from stages.shared.pages.page import artifact_page
from stages.shared.pages.report import REPORT_HTML

LOCK_POLL_SECONDS = 0.5
MOST_COMPARED = 20  # artifacts, to say why there is no finished one
_HEX = re.compile("[0-9a-f]+")

log = logging.getLogger("athanor.stage")


def scratch_dir(root: StorePath, stage: Stage, identity: Mapping[str, Any]) -> StorePath:
    """Return the directory in which the artifact of this identity is made."""
    if is_local(root) or stage.on_disk:
        return side_dir(root) / "scratch" / f"{stage.name}-{fingerprint(identity)}"
    return artifact_dir(root, stage, identity)


def check_places(root: StorePath, stages: Collection[str]) -> None:
    """Check that no file of a root is where its stages need a directory, and no directory where they need a file.

    Args:
        stages: names of the stages.

    Raises:
        InputError: something is; the text names it.
    """
    scratch, directories = side_dir(root) / "scratch", []
    if is_local(root):
        of_stages = [root / "artifacts" / name for name in stages]
        of_fingerprints = [path for place in of_stages for path in place.glob("*") if _HEX.fullmatch(path.name)]
        directories = [root / "artifacts", *of_stages, *of_fingerprints]
    for path in scratch.glob("*"):
        stage, _, name = path.name.rpartition("-")
        digits, dot, _ = name.partition(".")
        if stage not in stages or not _HEX.fullmatch(digits):
            continue
        if not dot:
            directories.append(path)
        elif path.is_dir():
            raise InputError(f"{path} is a directory, and a file is needed there; move it away")
    for path in (scratch, *directories):
        check_directory(path)


def run_stage(
    stage: Stage,
    config: BaseModel,
    inputs: Mapping[str, Input],
    root: StorePath,
    resources: StageResources | None = None,
) -> StageResult:
    """Reuse or make the artifact of this identity; wait while another process makes it. An artifact from inputs of the
    same fingerprints with other content is removed and made again.

    Args:
        config: the identity config, a frozen pydantic model that JSON can represent.
        inputs: role -> artifact or external directory.
        resources: execution settings, which are never part of the fingerprint; None: one process of this machine.

    Raises:
        InputError: the disk is full, or a file of an input or of the reused artifact was changed.
    """
    started = time.perf_counter()
    identity = stage_identity(stage, config, inputs)
    final = artifact_dir(root, stage, identity)
    work = scratch_dir(root, stage, identity)
    lock = side_dir(root) / "scratch" / f"{stage.name}-{fingerprint(identity)}"
    found = _reused(stage, final, lock, logging.DEBUG)
    if found is not None and not changed_inputs(found, inputs):
        return StageResult(found, True, time.perf_counter() - started)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with _locked(work, lock):
        found = _reused(stage, final, lock, logging.WARNING)  # the process that held the lock may have made it
        if found is None or changed_inputs(found, inputs):
            check_inputs(inputs)
            if found is not None:
                log.warning(
                    "%s: %s was made from inputs (%s) that were made again since, with other content; "
                    "it is made again too",
                    stage.name,
                    final,
                    ", ".join(changed_inputs(found, inputs)),
                )
                remove_tree(final)
                found = None
            with _begun(lock.with_name(f"{lock.name}.parents.json"), work, inputs):
                if is_local(final) and (final / MANIFEST).is_file():  # damaged: the stage starts from its other files
                    shutil.rmtree(work, ignore_errors=True)
                    work.parent.mkdir(parents=True, exist_ok=True)
                    os.rename(final, work)
                    (work / MANIFEST).unlink()
                make_dir(work)
                _make(stage, config, inputs, work, resources or StageResources(), identity, final)
                _publish(work, final)
    return StageResult(found or Artifact.load(final), found is not None, time.perf_counter() - started)


def _reused(stage: Stage, final: StorePath, beside: Path, level: int) -> Artifact | None:
    """Return the finished artifact if it exists and is not damaged; otherwise None."""
    if not (final / MANIFEST).is_file():
        if is_local(final) and final.is_dir():
            raise InputError(f"{final / MANIFEST} is missing; delete {final} and run the same command again")
        return None
    artifact, digests = Artifact.load(final), DigestCache(beside.with_name(f"{beside.name}.whole.json"))
    if artifact.manifest.fingerprint != final.name:
        raise damaged(final / MANIFEST, f"is that of another artifact, {artifact.manifest.fingerprint}")
    check_reused(artifact, digests.digest)
    if stage.check is not None and is_local(final):
        try:
            stage.check(artifact, digests.digest)
        except DamagedFile as error:
            what = str(error).partition("; delete ")[0]  # the way out of a user whom no stage helps
            log.log(level, "%s: %s; the stage continues from the intact files", stage.name, what)
            return None
    digests.keep()
    return artifact


@contextlib.contextmanager
def _begun(record: Path, work: StorePath, inputs: Mapping[str, Input]) -> Iterator[None]:
    """Keep the digests of the inputs in a file while an artifact is made. Unfinished work from other inputs, of an
    earlier run, is removed."""
    digests = {role: item.parent().digest for role, item in inputs.items()}
    with contextlib.suppress(InputError):  # no such file, or a run was killed while it wrote the file
        if read_object(record, "") != digests and work.exists():
            remove_tree(work)
    write_json(record, digests)
    yield
    record.unlink()  # only after success: a failed run leaves it for its unfinished work


def _make(
    stage: Stage,
    config: BaseModel,
    inputs: Mapping[str, Input],
    work: StorePath,
    resources: StageResources,
    identity: Mapping[str, Any],
    final: StorePath,
) -> None:
    """Run the stage in its work directory, and write the page and the manifest there."""
    if (work / MANIFEST).is_file():  # an earlier run ended just before the rename
        return
    try:
        if is_local(work):
            for unfinished in work.rglob("*.tmp"):  # files that a killed run was writing
                unfinished.unlink()
        output = stage.run(config, inputs, work, resources)
        manifest = Manifest(
            stage=stage.name,
            version=stage.version,
            fingerprint=fingerprint(identity),
            config=identity["config"],
            parents={role: item.parent() for role, item in inputs.items()},
            shards=output.shards,
            files=file_entries(work, stage.digested, output.files),
            skips=output.skips,
            stats=output.stats,
        )
        _write_page(stage, Artifact(work, manifest), inputs, final)
        if not is_local(work):  # the manifest publishes the artifact, so commit records are removed before
            remove_entries(work, [shard.name for shard in output.shards])
        manifest.write(work)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        place = work if is_local(work) else side_dir(work)
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
        raise InputError(
            f"disk full while {stage.name} wrote {place} ({free / 1e6:.0f} MB free); finished parts are kept: "
            "free space or choose another --root, then run the same command again"
        ) from error


def _write_page(stage: Stage, artifact: Artifact, inputs: Mapping[str, Input], final: StorePath) -> None:
    """Write the artifact's page, with links from its final directory. An error in the drawing of its contents is only
    logged: the page does without them."""
    # A page made later shows the manifest as it is read from its file. This page must have the same bytes.
    as_read = json.dumps(artifact.manifest.model_dump(mode="json"), sort_keys=True)
    artifact = Artifact(artifact.dir, Manifest.model_validate_json(as_read))
    contents = ""
    if stage.contents is not None:
        try:
            contents = resolve_name(stage.contents)(artifact, inputs)
        except Exception as error:
            name = type(error).__name__
            log.warning("%s: the page of %s has no samples (%s: %s)", stage.name, artifact.dir, name, error)
    write_text(artifact.dir / REPORT_HTML, artifact_page(artifact.dir, artifact.manifest, contents, home=final))


def _publish(work: StorePath, final: StorePath) -> None:
    """Move a finished work directory to its final path."""
    if not is_local(work):
        return
    remove_entries(work, [shard.name for shard in load_manifest(work).shards])
    if is_local(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(work, final)
    else:
        upload_dir(work, final, MANIFEST)
        shutil.rmtree(work)


@contextlib.contextmanager
def _locked(work: StorePath, name: Path) -> Iterator[None]:
    """Hold the lock of a scratch directory; `name` is its path without ending. If the lock is taken, log its owner and
    wait."""
    owner, lock = name.with_name(name.name + ".owner.json"), filelock.FileLock(name.with_name(name.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        who = {}
        with contextlib.suppress(InputError):  # the owner may be writing it, or was killed while it wrote it
            who = read_object(owner, "")
        pid, host = who.get("pid", "?"), who.get("host", "?")
        log.warning("%s is being made by process %s on %s; waiting for it to end", work, pid, host)
        lock.acquire(poll_interval=LOCK_POLL_SECONDS)
    owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    try:
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def why_rebuild(root: StorePath, stage: Stage, identity: Mapping[str, Any]) -> str:
    """Explain why there is no artifact of this identity, compared with the nearest of the newest of the same stage."""
    if scratch_dir(root, stage, identity).is_dir():  # in a store: a prefix that is not empty
        return "unfinished: an earlier run was interrupted, its finished parts will be used"
    places = [d for d in (root / "artifacts" / stage.name).glob("*") if (d / MANIFEST).is_file()]
    places.sort(key=lambda place: modified(place / MANIFEST), reverse=True)

    def fields(version: int, config: Mapping[str, Any], parents: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        made_from = {f"input {role}": f"{p['name']}@{p['fingerprint'][:8]}" for role, p in parents.items()}
        return {"version": version, **config, **made_from}

    made = []
    for place in places[:MOST_COMPARED]:
        with contextlib.suppress(InputError):  # it is damaged, which is said where it is needed
            one = load_manifest(place)
            parents = {role: parent.model_dump() for role, parent in one.parents.items()}
            made.append(fields(one.version, one.config, parents))
    if not made:
        return "never made in this root"
    wanted = fields(identity["version"], identity["config"], identity["parents"])
    return describe_drift(min(made, key=lambda one: len(drifted(one, wanted))), wanted)
