"""The pipeline's interface to MLflow, and the thread that sends: one pipeline run is one MLflow run.

Every call of a `Tracker` changes the run's record on this machine's disk and returns. A thread of the process looks at
the records and metrics of its runs every half second, and publishes what MLflow lacks (`publish.py`). What MLflow did
not take is sent at a later look: by the same process, by the next run, or by `athanor sync`. So MLflow may be down,
slow or full: the pipeline does not wait for it and nothing is lost.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from dataset_builders.storage.store import StorePath, absolute, side_dir
from flows.tracking.publish import Publication, Published
from flows.tracking.record import (
    LiveTraining,
    MlflowState,
    Opening,
    Registration,
    StageEntry,
    TrackedRun,
    changed,
    error_line,
    load_record,
    now_ms,
    open_record,
    place_in,
    samples_path,
    waiting_records,
)
from flows.tracking.store import compare_url, server_url, store_digest
from flows.tracking.system import sampled_host
from stages.shared.artifacts.artifact import Artifact

WAIT_SECONDS = 60.0  # longest wait at the end of a run for one answer of MLflow, beside an upload
KILLED_SECONDS = 10.0  # longest wait of a cancelled flow, which has to end
_URL_SECONDS = 5.0
_FAILED_LOOKS = 6  # looks without MLflow after which nobody waits any more
_POLL_SECONDS = 0.5  # a look at the files of a run takes 0.1 ms
_OTHERS_SECONDS = 60.0  # between two tries to send the runs of other processes
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
    """One MLflow run, named by its key. No call raises: an error is logged. If `key` is None, calls do nothing."""

    def __init__(self, root: StorePath, key: str | None) -> None:
        self.root, self.key = root, key

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
            log.warning("tracking: %s failed (%s: %s); the pipeline goes on", what, type(error).__name__, error)
            return None

    def _place(self, path: StorePath) -> str:
        return place_in(self.root, absolute(path))

    def log_stage(self, artifact: Artifact, name: str | None = None, dataset: str | None = None) -> None:
        """Add an artifact to the run: its files, its curves, its comparison.

        Args:
            name: name of the step in the plan, since a stage may run more than once; None for the stage's own name.
            dataset: the artifact's use as data, for example "samples"; None if it is not data.
        """
        name = name or artifact.manifest.stage
        entry = StageEntry(dir=self._place(artifact.dir), fingerprint=artifact.manifest.fingerprint, dataset=dataset)
        self._change(f"log_stage of {name}", lambda record: record.stages.update({name: entry}))

    def follow(self, metrics: Path, num_steps: int) -> contextlib.AbstractContextManager[None]:
        """Have the lines of a training's metrics.jsonl, which may not exist yet, sent while they are written. Return a
        context that samples this machine, if the trainer runs on it.

        Args:
            num_steps: number of steps of the whole training, which decides which lines are sent (see `thinned`).
        """
        live = LiveTraining(metrics=self._place(metrics), num_steps=num_steps)
        record = self._change("follow", lambda record: setattr(record, "live", live))
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
            hf_dir: directory of the model's files and card.
            scores: subset -> metric -> value; None: the scores of the evaluation.
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
        except (OSError, ValueError) as error:
            log.warning("tracking: finish failed (%s: %s); the pipeline goes on", type(error).__name__, error)
            return
        if not is_whole:
            log.warning(
                "tracking: MLflow does not hold all of the run yet; `athanor sync --root %s` sends the rest, and so "
                "does the next run",
                self.root,
            )

    def _record(self) -> TrackedRun | None:
        with contextlib.suppress(OSError, ValueError):
            return None if self.key is None else load_record(self.root, self.key)
        return None

    def learnt(self) -> MlflowState:
        """Return the answers of MLflow; empty if the record cannot be read, since that must not end a run."""
        record = self._record()
        return MlflowState() if record is None else record.learnt

    def is_sent(self) -> bool:
        """Whether MLflow holds the run as the record has it; False if the record cannot be read."""
        record = self._record()
        return record is not None and not record.is_waiting()

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
        """Return the address of MLflow's page that compares this run with the newest other run on the same data; None
        if there is none. Must be called after `finish`."""
        learnt = self.learnt()
        base = server_url(self.root) if learnt.run_id and learnt.compare else None
        return base and compare_url([learnt.run_id, learnt.compare], learnt.experiment_id, base)


def compare_page(root: StorePath, keys: Sequence[str | None]) -> str | None:
    """Return the address of MLflow's page that compares these runs; None if fewer than two of them are in MLflow, or if
    no server is known."""
    answers = [answer for key in keys if (answer := Tracker(root, key).learnt()).run_id is not None]
    in_mlflow = [answer for answer in answers if answer.store == store_digest(root)]
    base = server_url(root) if len(in_mlflow) > 1 else None
    return base and compare_url([answer.run_id for answer in in_mlflow], in_mlflow[0].experiment_id, base)


class Sender:
    """The sending thread of this process for one root. All methods except `wait` return at once.

    Attributes:
        problem: the error of the last look; empty if everything was sent.
    """

    def __init__(self, root: StorePath) -> None:
        self.root, self.problem = root, ""
        self._runs: dict[str, Publication] = {}
        self._mutex = threading.Lock()  # held while `_runs` changes
        self._thread: threading.Thread | None = None
        self._failed_looks = 0
        self._others_at = 0.0  # time of the next look at the runs of other processes; 0 before the first
        self._busy_until = 0.0  # time until which the next answer of MLflow may take

    def follow(self, key: str) -> None:
        """Let the thread send a run's record and metrics whenever they change, until the run has ended."""
        with self._mutex:
            if key not in self._runs:
                self._runs[key] = Publication(self.root, key, self._announce)
            if self._thread is None:
                self._others_at = 0.0
                self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
                self._thread.start()

    def wait(self, key: str, is_cancelled: bool = False) -> bool:
        """Wait until the present record of a run is completely in MLflow and the rest of earlier runs was tried.

        The wait ends after several failures of MLflow, or if MLflow does not answer for WAIT_SECONDS, or during an
        upload for WAIT_SECONDS longer than the upload should take.

        Args:
            is_cancelled: whether the wait ends after KILLED_SECONDS in any case.

        Returns:
            whether the run is completely in MLflow.
        """
        start, failed = time.monotonic(), self._failed_looks
        while (is_waiting := load_record(self.root, key).is_waiting()) or self._others_at == 0:
            end = start + KILLED_SECONDS if is_cancelled else max(start + WAIT_SECONDS, self._busy_until)
            if time.monotonic() > end or self._failed_looks >= failed + _FAILED_LOOKS:
                break
            time.sleep(0.1)
        return not is_waiting

    def _work(self) -> None:
        while True:
            problems = [self._look(key) for key in list(self._runs)]
            if not any(problems) and time.monotonic() > self._others_at:
                try:
                    others = publish_waiting(self.root, list(self._runs), self._announce)
                    problems += [other.problem for other in others]
                except OSError as error:  # the records cannot be listed now
                    problems.append(error_line(error))
                # The others are tried until nothing of them is left.
                self._others_at = time.monotonic() + _OTHERS_SECONDS if any(problems) else float("inf")
            problem = next(filter(None, problems), "")
            if problem and problem != self.problem:
                log.warning("tracking: MLflow does not answer (%s); the pipeline goes on, runs wait", problem)
            self.problem = problem
            self._failed_looks += bool(problem)
            with self._mutex:
                if not self._runs:
                    self._thread = None
                    return
            time.sleep(_POLL_SECONDS)

    def _look(self, key: str) -> str:
        """Send what MLflow lacks of a run, and forget a run that has ended. Return the error; "" if all went well."""
        publication = self._runs[key]
        problem = publication.attempt().problem
        with self._mutex, contextlib.suppress(OSError, ValueError):
            record = load_record(self.root, key)  # again, since a new try of the run may have begun
            if record.status is not None and not record.is_waiting():
                del self._runs[key]
                publication.lock.release()
        return problem

    def _announce(self, seconds: float) -> None:
        self._busy_until = time.monotonic() + seconds + WAIT_SECONDS


_senders: dict[Path, Sender] = {}
_senders_mutex = threading.Lock()


def sender_of(root: StorePath) -> Sender:
    """Return the sender of a root. There is one per process and root."""
    with _senders_mutex:
        return _senders.setdefault(side_dir(root).resolve(), Sender(root))


def publish_waiting(
    root: StorePath, but: Collection[str] = (), announce: Callable[[float], None] = lambda seconds: None
) -> list[Published]:
    """Publish the rest of earlier runs of this root, the oldest run first, except the runs with the keys `but`."""
    outcomes = []
    for key, _ in waiting_records(root):
        if key not in but:
            publication = Publication(root, key, announce)
            outcomes.append(publication.attempt())
            publication.lock.release()
    return outcomes
