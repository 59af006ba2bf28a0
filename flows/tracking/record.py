"""The run record: with the artifacts that it names, it decides the content of a pipeline run in MLflow.

    <side_dir(root)>/tracking/<identity>.json           the record, written whole by a rename
    <side_dir(root)>/tracking/<identity>.system.jsonl   figures of the trainer's machine, one line per sample
    <side_dir(root)>/tracking/<identity>.edit.lock      held while the record is read and written again
    <side_dir(root)>/tracking/<identity>.publish.lock   held by the process that publishes the run

The identity is that of the pipeline run, so a second try of a run goes on in its record. Places in the root are written
relative to it, so that a record is as good in a root that was copied or moved.
"""

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
from pydantic import BaseModel, ConfigDict, Field

from dataset_builders.errors import one_line
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import StorePath, absolute, location, side_dir
from flows.tracking.config import ArtifactLevel, RegistryConfig
from stages.launchers.owner import Owner

FORMAT_VERSION = 1
log = logging.getLogger("athanor.tracking")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Opening(_Part):
    """The facts with which an MLflow run begins.

    Attributes:
        experiment, name: of the MLflow run.
        identity: fingerprint of everything that decides the outcome; a repeated pipeline run goes on in its MLflow run.
        params: nested config; becomes dotted parameters.
        tags: may change between two tries.
        note: description, in Markdown.
        recipe_yaml: the whole configuration, kept as a file of the run.
        registry: when its model becomes champion.
        artifacts: which files are uploaded.
        samples_host: whether the trainer runs on this machine, so that its system metrics are of use.
    """

    experiment: str
    name: str
    identity: str
    params: dict[str, Any]
    tags: dict[str, str]
    note: str = ""
    recipe_yaml: str = ""
    registry: RegistryConfig = RegistryConfig()
    artifacts: ArtifactLevel = "small"
    samples_host: bool = True


class StageEntry(_Part):
    """An artifact that belongs to the run.

    Attributes:
        dir: of the artifact, as `place_in` gives it.
        fingerprint: of the artifact.
        reused: whether it was made before the run.
        dataset: its use as data, for example "training"; None if it is not data.
    """

    dir: str
    fingerprint: str
    reused: bool
    dataset: str | None = None


class Registration(_Part):
    """A request to the model registry.

    Attributes:
        name: of the registered model.
        exported, evaluated: directories of the artifacts that hold the model and its scores, as `place_in` gives them.
        scores: subset -> metric -> value.
        hf_dir: the model's files with their card, likewise.
        refusals: one line per gate that failed; empty if the model may be registered.
    """

    name: str
    exported: str
    evaluated: str
    scores: dict[str, dict[str, float | None]]
    hf_dir: str
    refusals: list[str] = []


class Learnt(_Part):
    """Answers of MLflow that are kept.

    Attributes:
        store: digest of the address of the tracking store that gave the rest.
        published: the newest revision of the record that MLflow holds whole.
        compare: ids of the runs beside this one on MLflow's compare page.
        system_bytes: size of the machine's samples that were sent.
        refused: part of the run -> why MLflow will never take it.
        verdict: why the run's model is champion, or why not.
        decided_ms: time of that decision, in milliseconds since 1970.
        model_bytes: of the model's files that were copied or uploaded.
    """

    store: str = ""
    published: int = 0
    run_id: str | None = None
    experiment_id: str | None = None
    compare: list[str] = []
    system_bytes: int = 0
    refused: dict[str, str] = {}
    verdict: str = ""
    decided_ms: int = 0
    model_bytes: int = 0


class TrackedRun(_Part):
    """One pipeline run.

    Attributes:
        creation: mark of the MLflow runs that were made for this record; there may be two for a while.
        owner: the process that runs the pipeline.
        first_ms, opened_ms, changed_ms: times of the first opening, the last opening and the last change, in
            milliseconds since 1970, as everywhere here.
        live: metrics.jsonl of the training while it runs, as `place_in` gives it.
        stages: name of the stage in the pipeline -> its artifact.
        status, ended_ms: of the last try's end; None while it runs.
        revision: number of changes.
    """

    format_version: int = FORMAT_VERSION
    opening: Opening
    creation: str = Field(default_factory=lambda: uuid.uuid4().hex)
    owner: Owner
    first_ms: int
    opened_ms: int
    changed_ms: int
    live: str | None = None
    stages: dict[str, StageEntry] = {}
    registration: Registration | None = None
    status: str | None = None
    ended_ms: int | None = None
    revision: int = 0
    learnt: Learnt = Learnt()

    def is_waiting(self) -> bool:
        """Whether MLflow lacks something, as far as is known here, or the run's process died without ending it."""
        return self.learnt.published < self.revision or (self.status is None and self.owner.is_dead())

    def end(self, status: str, ended_ms: int) -> None:
        """End the try. A run that is finished stays so."""
        if self.status != "FINISHED":
            self.status, self.ended_ms = status, ended_ms


def records_dir(root: StorePath) -> Path:
    """The directory of a root's records, on this machine."""
    return side_dir(root).resolve() / "tracking"


def place_in(root: StorePath, path: StorePath) -> str:
    """A path as a record keeps it: relative to the root, or of a store to its directory here, if it lies there."""
    for base in (absolute(root), side_dir(root).resolve()):
        below = str(path).removeprefix(f"{str(base).rstrip('/')}/")
        if below != str(path):
            return below
    return str(path)


def find_place(root: StorePath, place: str) -> StorePath:
    """The path of an artifact's directory from its place in a record."""
    if "://" not in place and not Path(place).is_absolute():
        return absolute(root) / place
    for folder in ("artifacts", "scratch"):  # a record of before, absolute: its root may have been moved since
        _, is_below, rest = place.rpartition(f"/{folder}/")
        if is_below and (moved := absolute(root) / folder / rest).exists():
            return moved
    return location(place)


def live_path(root: StorePath, record: "TrackedRun") -> Path | None:
    """The metrics of the training that runs, on this machine; None if there is none."""
    return None if record.live is None else find_place(side_dir(root), record.live)


def system_path(root: StorePath, key: str) -> Path:
    """The file of the figures of the trainer's machine."""
    return records_dir(root) / f"{key}.system.jsonl"


def publish_lock(root: StorePath, key: str) -> filelock.BaseFileLock:
    """The lock of the one process that publishes a run."""
    return filelock.FileLock(records_dir(root) / f"{key}.publish.lock", thread_local=False)


def load_record(root: StorePath, key: str) -> TrackedRun:
    """The record of a run.

    Raises:
        OSError: there is no record.
        ValueError: it cannot be read, or is of another version of athanor.
    """
    path = records_dir(root) / f"{key}.json"
    record = TrackedRun.model_validate_json(path.read_bytes())
    if record.format_version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version is {record.format_version}, {FORMAT_VERSION} is read here; remove it")
    return record


def open_record(root: StorePath, opening: Opening) -> None:
    """Begin a run's record, or a new try in the record that its identity has.

    Raises:
        OSError: it cannot be written.
    """
    records_dir(root).mkdir(parents=True, exist_ok=True)
    with _edit_lock(root, opening.identity):
        now = now_ms()
        fields = {"opening": opening, "owner": Owner.of_this_process(), "opened_ms": now, "changed_ms": now}
        try:
            before = load_record(root, opening.identity)
        except (OSError, ValueError):  # a new record: MLflow's own marks say what it holds
            record = TrackedRun(**fields, first_ms=now, revision=1)
        else:
            fields |= {"status": None, "ended_ms": None, "revision": before.revision + 1}
            record = before.model_copy(update=fields)
        _write(root, record)


@contextlib.contextmanager
def changed(root: StorePath, key: str) -> Iterator[TrackedRun]:
    """The record, to be changed in the block; after it, the change waits to be published.

    Raises:
        OSError, ValueError: as `load_record`; or it cannot be written.
    """
    with _edit_lock(root, key):
        record = load_record(root, key)
        yield record
        record.revision += 1
        record.changed_ms = now_ms()
        _write(root, record)


def save_learnt(root: StorePath, key: str, learnt: Learnt) -> None:
    """Keep the answers of MLflow, beside changes that the pipeline has made meanwhile."""
    with _edit_lock(root, key):
        record = load_record(root, key)
        if record.learnt != learnt:
            record.learnt = learnt
            _write(root, record)


def append_system(root: StorePath, key: str, values: Mapping[str, float]) -> None:
    """Append a sample of the machine's figures."""
    with system_path(root, key).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time_ms": now_ms(), "values": dict(values)}) + "\n")
        file.flush()
        os.fsync(file.fileno())


_settled: dict[Path, int] = {}  # record that waits for nothing -> time at which it was written, in ns


def waiting_records(root: StorePath) -> list[tuple[str, TrackedRun]]:
    """(key, record) of the runs of which MLflow lacks something, by the time of their opening."""
    waiting = []
    for path in records_dir(root).glob("*.json"):
        written_ns = path.stat().st_mtime_ns
        if _settled.get(path) == written_ns:
            continue
        try:
            record = load_record(root, path.stem)
        except (OSError, ValueError) as error:
            log.warning("tracking: %s cannot be read (%s); its run is not sent", path, error_line(error))
            _settled[path] = written_ns
            continue
        if record.is_waiting():
            waiting.append((path.stem, record))
        elif record.status is not None:
            _settled[path] = written_ns
    return sorted(waiting, key=lambda item: (item[1].opened_ms, item[0]))


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def error_line(error: Exception, limit: int = 200) -> str:
    """An error as a line of a log: its class, and its text up to `limit` characters."""
    return f"{type(error).__name__}: {one_line(error, limit)}"


def _edit_lock(root: StorePath, key: str) -> filelock.BaseFileLock:
    return filelock.FileLock(records_dir(root) / f"{key}.edit.lock")


def _write(root: StorePath, record: TrackedRun) -> None:
    write_text(records_dir(root) / f"{record.opening.identity}.json", record.model_dump_json(indent=1) + "\n")
