"""The run record, which decides the content of a pipeline run in MLflow together with the artifacts that it names.

    <side_dir(root)>/tracking/<identity>.json           the record, written atomically by a rename
    <side_dir(root)>/tracking/<identity>.system.jsonl   samples of the machine (see `system.py`)
    <side_dir(root)>/tracking/<identity>.edit.lock      held while the record is read, changed and written
    <side_dir(root)>/tracking/<identity>.publish.lock   held by the process that publishes the run

The identity is the identity of the pipeline run, so a second try of a run continues the same record. Paths in the root
are stored relative to the root, so that a record stays valid if the root is copied or moved.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from pydantic import BaseModel, ConfigDict, Field

from dataset_builders.errors import LONGEST_LINE, InputError, one_line
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import StorePath, absolute, location, side_dir
from flows.tracking.config import ArtifactLevel, RegistryConfig
from stages.shared.launchers.processes import Owner

REFUSED = "REFUSED"  # status of a run that ended with an error of its input before its first stage
FLOW_RUN_TAG, SWEEP_TAG = "prefect.flow_run_id", "athanor.sweep"  # of an opening; not every run has a sweep
log = logging.getLogger("athanor.tracking")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Opening(_Part):
    """The facts that are known when an MLflow run starts.

    Attributes:
        is_named: whether a person chose the name; a later try without such a name keeps it.
        identity: fingerprint of everything that decides the outcome. A repeated pipeline run continues its MLflow run.
        params: nested config, which becomes dotted parameters.
        tags: tags of the run, which may change between two tries.
        note: description in Markdown.
        recipe_yaml: the whole configuration, stored as a file of the run.
        execution_yaml: the settings of execution, a file of the run which may change between two tries.
        samples_host: whether the trainer runs on this machine, so that this machine's system metrics are useful.
    """

    experiment: str
    name: str
    is_named: bool = False
    identity: str
    params: dict[str, Any]
    tags: dict[str, str]
    note: str = ""
    recipe_yaml: str = ""
    execution_yaml: str = ""
    registry: RegistryConfig = RegistryConfig()
    artifacts: ArtifactLevel = "small"
    samples_host: bool = True


class StageEntry(_Part):
    """An artifact that belongs to the run.

    Attributes:
        dir: directory of the artifact, in the form that `place_in` returns.
        dataset: the artifact's use as data, for example "samples"; None if it is not data.
    """

    dir: str
    fingerprint: str
    dataset: str | None = None


class LiveTraining(_Part):
    """A running training.

    Attributes:
        metrics: path of its metrics.jsonl, in the form that `place_in` returns.
        num_steps: number of steps of the whole training.
    """

    metrics: str
    num_steps: int = Field(ge=1)


class Registration(_Part):
    """A request to the model registry.

    Attributes:
        exported, evaluated: directories of the artifacts with the model and its scores, in the form of `place_in`.
        scores: subset -> metric -> value.
        hf_dir: directory of the model's files and card, in the form of `place_in`.
        refusals: one line per gate that failed; empty if the model may be registered.
    """

    name: str
    exported: str
    evaluated: str
    scores: dict[str, dict[str, float | None]]
    hf_dir: str
    refusals: list[str] = []


class MlflowState(_Part):
    """The answers of MLflow that are stored in the record.

    Attributes:
        store: digest of the address of the tracking store that gave the answers.
        published: the newest revision of the record that is completely in MLflow.
        compare: id of the newest other run on the same data.
        refused: part of the run -> reason why MLflow will never take it.
        verdict: why the run's model is champion, or why not.
        decided_ms: time of that decision, in milliseconds since 1970.
    """

    store: str = ""
    published: int = 0
    run_id: str | None = None
    experiment_id: str | None = None
    compare: str | None = None
    refused: dict[str, str] = {}
    verdict: str = ""
    decided_ms: int = 0


class TrackedRun(_Part):
    """One pipeline run.

    Attributes:
        creation: mark of the MLflow runs that were made for this record. There may be two such runs for a while.
        owner: the process that runs the pipeline.
        first_ms, opened_ms, changed_ms: times of the first opening, the last opening and the last change, in
            milliseconds since 1970.
        live: the running training; None if there is none yet. It stays after the training's end.
        stages: name of the stage in the pipeline -> its artifact.
        status, ended_ms: status and time at the end of the last try; None while it is running.
        revision: number of changes.
    """

    opening: Opening
    creation: str = Field(default_factory=lambda: uuid.uuid4().hex)
    owner: Owner
    first_ms: int
    opened_ms: int
    changed_ms: int
    live: LiveTraining | None = None
    stages: dict[str, StageEntry] = {}
    registration: Registration | None = None
    status: str | None = None
    ended_ms: int | None = None
    revision: int = 0
    learnt: MlflowState = MlflowState()

    def is_empty(self) -> bool:
        """Whether MLflow has no run and needs none yet: no stage has ended, no training runs, nothing has failed."""
        return self._has_no_work() and self.status in (None, REFUSED)

    def _has_no_work(self) -> bool:
        return not (self.stages or self.live or self.registration or self.learnt.run_id)

    def is_killed(self) -> bool:
        """Whether the run's process died without ending the run."""
        return self.status is None and self.owner.is_dead()

    def is_waiting(self) -> bool:
        """Whether MLflow lacks a known change of the record, or the end of a killed run."""
        return self.learnt.published < self.revision or self.is_killed()

    def end(self, status: str, ended_ms: int) -> None:
        """End the current try. A finished run stays finished."""
        if self.status != "FINISHED":
            self.status, self.ended_ms = status, ended_ms
            if status == REFUSED and not self._has_no_work():
                self.status = "FAILED"


def records_dir(root: StorePath) -> Path:
    """Return the directory of a root's records on this machine."""
    return side_dir(root).resolve() / "tracking"


def place_in(root: StorePath, path: StorePath) -> str:
    """Return a path in the form that a record stores. It is relative if it is below the root, or below the directory on
    this machine of a root in a store; otherwise it is unchanged."""
    for base in (absolute(root), side_dir(root).resolve()):
        below = str(path).removeprefix(f"{str(base).rstrip('/')}/")
        if below != str(path):
            return below
    return str(path)


def find_place(root: StorePath, place: str) -> StorePath:
    """Return the path of an artifact's directory from the form that a record stores."""
    if "://" not in place and not Path(place).is_absolute():
        return absolute(root) / place
    return location(place)


def live_path(root: StorePath, record: TrackedRun) -> Path | None:
    """Return the path of the running training's metrics on this machine; None if no training is running."""
    return None if record.live is None else find_place(side_dir(root), record.live.metrics)


def samples_path(root: StorePath, key: str) -> Path:
    """Return the path of the file with the samples of the trainer's machine."""
    return records_dir(root) / f"{key}.system.jsonl"


def publish_lock(root: StorePath, key: str) -> filelock.BaseFileLock:
    """Return the lock that the process that publishes a run must hold."""
    return filelock.FileLock(records_dir(root) / f"{key}.publish.lock", thread_local=False)


def load_record(root: StorePath, key: str) -> TrackedRun:
    """Load the record of a run. Raise an OSError if there is none, a ValueError if it cannot be parsed."""
    return TrackedRun.model_validate_json((records_dir(root) / f"{key}.json").read_bytes())


def open_record(root: StorePath, opening: Opening) -> None:
    """Create a run's record, or start a new try in the existing record of the same identity."""
    records_dir(root).mkdir(parents=True, exist_ok=True)
    with _edit_lock(root, opening.identity):
        now = now_ms()
        fields = {"opening": opening, "owner": Owner.of_this_process(), "opened_ms": now, "changed_ms": now}
        try:
            before = load_record(root, opening.identity)
        except (OSError, ValueError):  # a new record; the marks in MLflow show which content it already has
            record = TrackedRun(**fields, first_ms=now, revision=1)
        else:
            if before.opening.is_named and not opening.is_named:
                fields["opening"] = opening.model_copy(update={"name": before.opening.name, "is_named": True})
            fields |= {"status": None, "ended_ms": None, "revision": before.revision + 1}
            record = before.model_copy(update=fields)
        _write(root, record)


@contextlib.contextmanager
def changed(root: StorePath, key: str) -> Iterator[TrackedRun]:
    """Load the record, let the block change it, and write it with a new revision, which is then to be published."""
    with _edit_lock(root, key):
        record = load_record(root, key)
        yield record
        record.revision += 1
        record.changed_ms = now_ms()
        _write(root, record)


def save_learnt(root: StorePath, key: str, learnt: MlflowState) -> None:
    """Store the answers of MLflow in the record, and keep the changes that the pipeline has made in the meantime."""
    with _edit_lock(root, key):
        record = load_record(root, key)
        if record.learnt != learnt:
            record.learnt = learnt
            _write(root, record)


def waiting_records(root: StorePath) -> list[tuple[str, TrackedRun]]:
    """Return (key, record) of the runs that are not completely in MLflow, in the order of their opening."""
    waiting = []
    for path in records_dir(root).glob("*.json"):
        try:
            record = load_record(root, path.stem)
        except (OSError, ValueError) as error:
            log.warning("tracking: %s cannot be read (%s); its run is not sent", path, error_line(error))
            continue
        if record.is_waiting():
            waiting.append((path.stem, record))
    return sorted(waiting, key=lambda item: (item[1].opened_ms, item[0]))


def end_killed_run(root: StorePath, key: str) -> None:
    """End a run whose process was killed. Its end is the time of its last sign of life."""
    with changed(root, key) as record:
        if record.is_killed():
            files = [path for path in (live_path(root, record), samples_path(root, key)) if path and path.is_file()]
            record.end("KILLED", max([record.changed_ms, *(int(path.stat().st_mtime * 1000) for path in files)]))


def now_ms() -> int:
    """Return the present time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def error_line(error: Exception, limit: int = 200) -> str:
    """Return an error as one line for a log: the text of an InputError, else the class and up to `limit` characters."""
    if isinstance(error, InputError):
        return one_line(error, LONGEST_LINE)
    return f"{type(error).__name__}: {one_line(error, limit)}"


def _edit_lock(root: StorePath, key: str) -> filelock.BaseFileLock:
    return filelock.FileLock(records_dir(root) / f"{key}.edit.lock")


def _write(root: StorePath, record: TrackedRun) -> None:
    write_text(records_dir(root) / f"{record.opening.identity}.json", record.model_dump_json(indent=1) + "\n")
