"""The sending to MLflow: by one thread of a process that runs a pipeline, and for runs that could not be sent earlier.

After an error that may be temporary (MLflow is down, slow or full), the thread tries again, less and less often.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import filelock

from dataset_builders.storage.store import StorePath, side_dir
from flows.tracking.publish import Publication
from flows.tracking.record import (
    TrackedRun,
    changed,
    error_line,
    live_path,
    load_record,
    publish_lock,
    system_path,
    waiting_records,
)

PATIENCE_SECONDS = 10.0  # longest wait without an answer
LONGEST_WAIT_SECONDS = 60.0
_FAILED_ROUNDS = 3
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
_BUSY_SECONDS = 1.0  # between two looks at a run that another process publishes
_OTHERS_SECONDS = 60.0  # between two looks at the runs of other processes
log = logging.getLogger("athanor.tracking")


class Sender:
    """The sending thread of this process for one root. All methods except `wait` return at once."""

    def __init__(self, root: StorePath) -> None:
        self.root = root
        self.problem = ""  # error of the last round; empty if everything was sent
        self._submitted: Counter[str] = Counter()  # run -> number of its submissions
        self._sent: Counter[str] = Counter()  # run -> number of its submissions when it was last sent
        self._publications: dict[str, tuple[Publication, filelock.BaseFileLock]] = {}
        self._changed = threading.Condition()
        self._waiters = self._failed_rounds = 0
        self._others_at = 0.0
        self._answered = self._uploaded = 0.0  # times of the last answer, and of the last answer to an upload
        self._busy_until = 0.0  # latest time at which the running upload should end
        self._thread: threading.Thread | None = None

    def submit(self, key: str) -> None:
        """Let the thread send the new content of a run's record and metrics."""
        with self._changed:
            self._submitted[key] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, key: str, patience: float = PATIENCE_SECONDS, ends_uploads: bool = False) -> bool:
        """Wait until the present content of a run, and the rest of earlier runs, are completely in MLflow.

        The wait ends after `patience` seconds without an answer, after several failures of MLflow, or after
        LONGEST_WAIT_SECONDS without an upload.

        Args:
            patience: longest time without an answer of MLflow, in seconds.
            ends_uploads: whether the wait may end during an upload too.

        Returns:
            whether the run is completely in MLflow.
        """
        with self._changed:
            number, failed, start = self._submitted[key], self._failed_rounds, time.monotonic()
            self._waiters += 1
            self._changed.notify_all()
            try:
                while self._sent[key] < number or self._others_at == 0:
                    now = time.monotonic()
                    is_stuck = now - max(start, self._answered) > patience
                    is_stuck |= now - (start if ends_uploads else max(start, self._uploaded)) > LONGEST_WAIT_SECONDS
                    is_uploading = now < self._busy_until and not ends_uploads
                    if (is_stuck and not is_uploading) or self._failed_rounds - failed >= _FAILED_ROUNDS:
                        break
                    self._changed.wait(0.1)
                return self._sent[key] >= number
            finally:
                self._waiters -= 1

    def _work(self) -> None:
        retry = _FIRST_RETRY
        while True:
            with self._changed:
                submitted = Counter(self._submitted)
            self._round(submitted)
            with self._changed:
                self._failed_rounds += bool(self.problem)
                self._changed.notify_all()
                if self.problem:
                    self._changed.wait_for(lambda: self._waiters, timeout=retry)
                    retry = min(2 * retry, _LAST_RETRY)
                else:
                    retry = _FIRST_RETRY
                    pause = _OTHERS_SECONDS if self._sent >= submitted else _BUSY_SECONDS
                    self._changed.wait_for(lambda before=submitted: self._submitted != before, timeout=pause)
            if self.problem and self._waiters:
                time.sleep(_FIRST_RETRY)
                retry = _FIRST_RETRY

    def _round(self, submitted: Mapping[str, int]) -> None:
        """Send the submitted runs and, from time to time, the runs of other processes. Keep the first problem."""
        problems = []
        for key, number in submitted.items():
            try:
                if self._sent[key] < number and self._send(key):
                    self._sent[key] = number
            except Exception as error:
                problems.append(error_line(error))
        if not problems and (self._others_at == 0 or time.monotonic() - self._others_at > _OTHERS_SECONDS):
            others = publish_waiting(self.root, tuple(submitted), self._advance)
            problems += [other.problem for other in others if other.problem]
            self._others_at = time.monotonic()
        if problems and problems[0] != self.problem:
            log.warning("tracking: MLflow does not answer (%s); the pipeline goes on, runs wait", problems[0])
        self.problem = problems[0] if problems else ""

    def _send(self, key: str) -> bool:
        """Publish a run of this process. Return whether it is in MLflow now, even if another process has sent it."""
        if key not in self._publications:
            lock = publish_lock(self.root, key)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                return not load_record(self.root, key).is_waiting()
            self._publications[key] = Publication(self.root, key, self._advance), lock
        publication, lock = self._publications[key]
        publication.run()
        if publication.record.status is not None:
            del self._publications[key]
            lock.release()
        return True

    def _advance(self, seconds: float) -> None:
        self._answered = now = time.monotonic()
        if now < self._busy_until:
            self._uploaded = now
        self._busy_until = now + seconds


_senders: dict[Path, Sender] = {}
_senders_mutex = threading.Lock()


def sender_of(root: StorePath) -> Sender:
    """Return the sender of a root. There is one per process and root."""
    with _senders_mutex:
        return _senders.setdefault(side_dir(root).resolve(), Sender(root))


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


def publish_waiting(
    root: StorePath, but: Sequence[str] = (), on_answer: Callable[[float], None] = lambda seconds: None
) -> list[Published]:
    """Publish the rest of earlier runs of this root, the oldest run first. Never raises.

    A run whose process was killed is ended.

    Args:
        but: keys of runs to leave out.
        on_answer: see `Publication`.
    """
    return [_publish(root, key, record, on_answer) for key, record in waiting_records(root) if key not in but]


def _publish(root: StorePath, key: str, record: TrackedRun, on_answer: Callable[[float], None]) -> Published:
    lock, name = publish_lock(root, key), record.opening.name
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return Published(name, is_sending=True)
    publication, problem = Publication(root, key, on_answer), ""
    try:
        if record.status is None and record.owner.is_dead():
            end_killed_run(root, key)
        publication.run()
    except Exception as error:
        problem = error_line(error)
    finally:
        lock.release()
    return Published(name, publication.sent, problem)


def end_killed_run(root: StorePath, key: str) -> None:
    """End a run whose process was killed. Its end is the time of its last sign of life."""
    with changed(root, key) as record:
        if record.status is None and record.owner.is_dead():
            signs_ms = [record.changed_ms]
            for path in (live_path(root, record), system_path(root, key)):
                if path is not None and path.is_file():
                    signs_ms.append(int(path.stat().st_mtime * 1000))
            record.end("KILLED", max(signs_ms))
