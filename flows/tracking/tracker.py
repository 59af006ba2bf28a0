"""The pipeline's interface to MLflow: one pipeline run is one MLflow run, with a key that athanor gives.

Every call changes the run's record on this machine's disk and returns. A thread of the process publishes the record
(`sender.py`, `publish.py`). So MLflow may be down, slow or full: the pipeline does not wait for it and nothing is lost.
If a change cannot be written, the error is logged and added to `Tracker.problems`, and the pipeline continues.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dataset_builders.storage.store import StorePath, absolute
from flows.tracking.record import (
    MlflowState,
    Opening,
    Registration,
    StageEntry,
    TrackedRun,
    changed,
    load_record,
    now_ms,
    open_record,
    place_in,
    samples_path,
)
from flows.tracking.sender import sender_of
from flows.tracking.store import compare_url, server_url, store_digest
from flows.tracking.system import sampled_host
from stages.artifacts.artifact import Artifact

_URL_SECONDS = 5.0
log = logging.getLogger("athanor.tracking")


def open_run(root: StorePath, opening: Opening) -> str | None:
    """Start the MLflow run of a pipeline, or continue the existing MLflow run of the same identity.

    Returns:
        the run's key for `Tracker`; None, after a warning, if the record cannot be written.
    """
    try:
        open_record(root, opening)
    except Exception as error:
        log.warning("tracking: no run record below %s (%s); the pipeline goes on without", root, error)
        return None
    sender_of(root).follow(opening.identity)
    return opening.identity


class Tracker:
    """One MLflow run, named by its key. If `key` is None, every call does nothing.

    Attributes:
        problems: the errors of failed calls, in words. No call raises.
    """

    def __init__(self, root: StorePath, key: str | None) -> None:
        self.root, self.key = root, key
        self.problems: list[str] = []

    def _change(self, what: str, edit: Callable[[TrackedRun], object]) -> TrackedRun | None:
        """Change the record and have it published. Return None, after a warning, if that failed."""
        if self.key is None:
            return None
        try:
            with changed(self.root, self.key) as record:
                edit(record)
            sender_of(self.root).follow(self.key)
            return record
        except Exception as error:
            self._fail(what, error)
            return None

    def _place(self, path: StorePath) -> str:
        return place_in(self.root, absolute(path))

    def _fail(self, what: str, error: Exception) -> None:
        log.warning("tracking: %s failed (%s: %s); the pipeline goes on", what, type(error).__name__, error)
        self.problems.append(f"{what}: {error}")

    def log_stage(self, artifact: Artifact, reused: bool, name: str | None = None, dataset: str | None = None) -> None:
        """Add an artifact to the run: its pages, its curves, its comparison.

        Args:
            name: name of the step in the plan, since a stage may run more than once; None for the stage's own name.
            dataset: the artifact's use as data, for example "training"; None if it is not data.
        """
        manifest, name = artifact.manifest, name or artifact.manifest.stage
        entry = StageEntry(
            dir=self._place(artifact.dir), fingerprint=manifest.fingerprint, reused=reused, dataset=dataset
        )
        self._change(f"log_stage of {name}", lambda record: record.stages.update({name: entry}))

    def follow(self, metrics: Path) -> contextlib.AbstractContextManager[None]:
        """Have the lines of a training's metrics.jsonl sent while they are written.

        Args:
            metrics: path of the file, which may not exist yet.

        Returns:
            a context that samples this machine, if the trainer runs on it.
        """
        record = self._change("follow", lambda record: setattr(record, "live", self._place(metrics)))
        if record is None or not record.opening.samples_host:
            return contextlib.nullcontext()
        return sampled_host(samples_path(self.root, self.key), record.first_ms)

    def register(
        self,
        exported: Artifact,
        evaluated: Artifact,
        hf_dir: StorePath,
        name: str,
        refusals: Sequence[str] = (),
        scores: Mapping[str, Mapping[str, float | None]] | None = None,
    ) -> None:
        """Log the exported directory as a model with its scores, and register it as a version.

        Args:
            scores: subset -> metric -> value; None: the scores of the evaluation.
            hf_dir: directory of the model's files and card.
            name: name of the registered model.
            refusals: one line per gate that failed; the model is then logged, with the reasons, but not registered.
        """
        registration = Registration(
            name=name,
            exported=self._place(exported.dir),
            evaluated=self._place(evaluated.dir),
            scores=evaluated.manifest.stats["scores"] if scores is None else dict(scores),
            hf_dir=self._place(hf_dir),
            refusals=list(refusals),
        )
        self._change("register", lambda record: setattr(record, "registration", registration))

    def finish(self, status: str) -> None:
        """End the run with a status: FINISHED, FAILED, KILLED, or REFUSED for an error of the input. A run that was
        finished before keeps its times. A run that was refused after a stage is a failed run.

        Wait a limited time until the run is completely in MLflow. The rest is sent later.
        """
        if self._change("finish", lambda record: record.end(status, now_ms())) is None:
            return
        try:
            is_whole = sender_of(self.root).wait(self.key, is_cancelled=status == "KILLED")
        except Exception as error:
            self._fail("finish", error)
            return
        if not is_whole:
            log.warning(
                "tracking: MLflow does not hold all of the run yet; `athanor sync --root %s` sends the rest, and so "
                "does the next run",
                self.root,
            )

    def learnt(self) -> MlflowState:
        """Return the answers of MLflow; empty if the record cannot be read, since that must not end a run."""
        try:
            return load_record(self.root, self.key).learnt
        except (OSError, ValueError):
            return MlflowState()

    def is_sent(self) -> bool:
        """Whether MLflow holds the run as the record has it; False if the record cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return self.key is not None and not load_record(self.root, self.key).is_waiting()
        return False

    def url(self, patience: float = _URL_SECONDS) -> str | None:
        """Return the address of the run's page on `server_url`; None if there is no such server, or if MLflow does not
        have the run after `patience` seconds."""
        deadline, sender = time.monotonic() + patience, sender_of(self.root)
        while self.key is not None:
            learnt = self.learnt()
            if learnt.run_id is not None and learnt.store == store_digest(self.root):
                base = server_url(self.root)
                return base and f"{base}/#/experiments/{learnt.experiment_id}/runs/{learnt.run_id}"
            if sender.problem or time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return None

    def compare_with_last(self) -> str | None:
        """Return the address of MLflow's page that compares this run with the newest other run on the same data.

        Must be called after `finish`. Return None if there is no such run.
        """
        if self.key is None:
            return None
        learnt = self.learnt()
        base = server_url(self.root)
        if learnt.run_id is None or not learnt.compare or base is None:
            return None
        return compare_url([learnt.run_id, *learnt.compare], learnt.experiment_id, base)


def compare_page(root: StorePath, keys: Sequence[str | None]) -> str | None:
    """Return the address of MLflow's page that compares these runs; None if fewer than two of them are in MLflow, or if
    no server is known."""
    answers = [Tracker(root, key).learnt() for key in keys if key is not None]
    in_mlflow = [answer for answer in answers if answer.run_id is not None and answer.store == store_digest(root)]
    ids = [answer.run_id for answer in in_mlflow]
    base = server_url(root)
    return compare_url(ids, in_mlflow[0].experiment_id, base) if len(ids) > 1 and base else None
