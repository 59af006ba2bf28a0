"""Publishes a run: adds to MLflow what it lacks of the run's record, artifacts and metrics.

A run consists of parts (`parts.py`). Once MLflow holds a part completely, a tag of the MLflow run has the part's state;
a part whose state has changed is added again. The times and steps of metrics come from files. So publishing again adds
exactly the missing content, whatever failed before.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import filelock
from mlflow import MlflowClient
from mlflow.entities import Run

from dataset_builders.storage.store import StorePath
from flows.libraries.mlflow_private import COLOUR_TAG, RUN_COLOURS, next_colour
from flows.tracking.parts import OpenRun, add_live_rows, parts_of
from flows.tracking.record import (
    MlflowState,
    TrackedRun,
    end_killed_run,
    error_line,
    load_record,
    publish_lock,
    save_learnt,
)
from flows.tracking.run_writer import HIDDEN, RunWriter
from flows.tracking.store import check_own_database, connect, experiment_of, may_pass, store_digest

_IDENTITY_TAG, _CREATION_TAG = f"{HIDDEN}identity", f"{HIDDEN}creation"
_HELD = f"{HIDDEN}held."  # and the name of a part
log = logging.getLogger("athanor.tracking")


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome for a run that was not completely in MLflow.

    Attributes:
        name: name of the MLflow run.
        sent: kind of content that was added -> number.
        problem: why the rest could not be sent; empty if nothing is left, or if the run's own process publishes it.
        is_sending: whether the run's own process publishes it.
    """

    name: str
    sent: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    is_sending: bool = False


class _Heard:
    """A client that calls a function after each answer of MLflow."""

    def __init__(self, client: MlflowClient, on_answer: Callable[[], None]) -> None:
        self._client, self._on_answer = client, on_answer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            self._on_answer()
            return answer

        return call


class Publication:
    """The publication of one run, which may be tried again and again.

    Args:
        announce: function that is called before an upload with the seconds that the upload may take, and with 0 after
            each answer of MLflow.

    Attributes:
        lock: the lock that the process that publishes the run holds.
        sent: kind of content that was added -> number.
    """

    def __init__(self, root: StorePath, key: str, announce: Callable[[float], None] = lambda seconds: None) -> None:
        self.root, self.key, self.announce = root, key, announce
        self.lock = publish_lock(root, key)
        self.sent: Counter[str] = Counter()
        self._client: _Heard | None = None
        self._open: OpenRun | None = None

    def attempt(self) -> Published:
        """Publish the run, unless another process does, and keep the lock. A run whose process was killed is ended."""
        name = self.key
        try:
            record = load_record(self.root, self.key)
            name = record.opening.name
            with contextlib.suppress(filelock.Timeout):
                if not self.lock.is_locked:
                    self.lock.acquire(timeout=0)
            if not self.lock.is_locked:
                return Published(name, is_sending=True)
            if record.is_killed():
                end_killed_run(self.root, self.key)
            self.run()
        except Exception as error:
            return Published(name, self.sent, error_line(error))
        return Published(name, self.sent)

    def run(self) -> None:
        """Bring MLflow up to the newest revision of the record and the newest lines of metrics.

        Raises:
            InputError: the root's own database is ruined or cannot be written.
            Exception: another error of MLflow or this machine's disk that may be temporary. Nothing is lost.
        """
        record = load_record(self.root, self.key)
        try:
            is_open = record.learnt.store == store_digest(self.root) and self._open is not None
            if record.is_empty():  # a run that is refused before its first stage leaves none in MLflow
                if record.is_waiting():
                    save_learnt(self.root, self.key, record.learnt.model_copy(update={"published": record.revision}))
            elif is_open and record.learnt.published == record.revision:
                self._open.record = record
                add_live_rows(self._open)
            else:
                self._publish(record)
        except Exception:
            self._client = self._open = None  # after a failure everything is read again
            check_own_database(self.root)
            raise

    def _publish(self, record: TrackedRun) -> None:
        if record.learnt.store != (store := store_digest(self.root)):
            record.learnt, self._client = MlflowState(store=store), None
        self._client = self._client or _Heard(connect(self.root), lambda: self.announce(0))
        before, writer = self._open, RunWriter(self._client, self._find_or_create(record))
        self._open = OpenRun(self.root, self.key, record, writer, self.announce, self.sent)
        if before is not None and before.writer.run_id == writer.run_id:  # else all lines are read and compared again
            writer.steps = before.writer.steps
            self._open.followed, self._open.held_files = before.followed, before.held_files
        learnt = record.learnt
        learnt.run_id, learnt.experiment_id = writer.run_id, writer.experiment_id
        save_learnt(self.root, self.key, learnt)  # other processes can now link to the run's page
        refused = {}
        for name, state, add in parts_of(self._open):
            mark = f"{_HELD}{name}"
            if state is not None and writer.tags.get(mark) == state:
                continue
            try:
                add()
                if state is not None:  # the mark is set last, so that a part that was added only in part is added again
                    writer.set_tags({mark: state})
            except Exception as error:
                if may_pass(error):
                    raise
                refused[name] = error_line(error, 500)
                if refused[name] != learnt.refused.get(name):
                    log.warning("tracking: MLflow never takes the %s (%s); the pipeline goes on", name, refused[name])
        learnt.refused, learnt.published = refused, record.revision
        save_learnt(self.root, self.key, learnt)

    def _find_or_create(self, record: TrackedRun) -> Run:
        """Return the MLflow run of this identity, or make it. A run that failed or was killed is set to running."""
        client, opening = self._client, record.opening
        experiment_id = experiment_of(client, self.root, opening.experiment)
        same = f"tags.`{_IDENTITY_TAG}` = '{opening.identity}'"
        runs = client.search_runs([experiment_id], same, order_by=["attributes.start_time ASC"])
        if not runs:
            newest = client.search_runs([experiment_id], "", 1, len(RUN_COLOURS), ["attributes.start_time DESC"])
            colour = next_colour([run.data.tags.get(COLOUR_TAG) for run in newest])
            marks = {_IDENTITY_TAG: opening.identity, _CREATION_TAG: record.creation, COLOUR_TAG: colour}
            return client.create_run(experiment_id, record.opened_ms, marks, opening.name)
        for double in runs[1:]:
            if double.data.tags.get(_CREATION_TAG) == record.creation:  # made because the server answered too late
                client.delete_run(double.info.run_id)
        info = runs[0].info
        status = "RUNNING" if record.status is None and info.status != "FINISHED" else info.status
        if (status, opening.name) != (info.status, info.run_name):
            client.update_run(info.run_id, status, opening.name)
        return runs[0]
