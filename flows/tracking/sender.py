"""The sending to MLflow: by one thread of a process that runs a pipeline, and for runs that could not be sent earlier.

The thread looks at the files of its runs every half second. What MLflow did not take is sent at a later look.
"""

import contextlib
import logging
import threading
import time
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
    samples_path,
    waiting_records,
)

WAIT_SECONDS = 60.0  # longest wait at the end of a run for one part of it, beside an upload
KILLED_SECONDS = 10.0  # longest wait of a cancelled flow, which has to end
_FAILED_ROUNDS = 6  # rounds without MLflow after which nobody waits any more
_POLL_SECONDS = 0.5  # a look at the files of a run takes 0.1 ms
_OTHERS_SECONDS = 60.0  # between two looks at the runs of other processes
log = logging.getLogger("athanor.tracking")


class Sender:
    """The sending thread of this process for one root. All methods except `wait` return at once."""

    def __init__(self, root: StorePath) -> None:
        self.root = root
        self.problem = ""  # error of the last round; empty if everything was sent
        self._runs: dict[str, tuple[Publication, filelock.BaseFileLock]] = {}
        self._mutex = threading.Lock()  # held while `_runs` changes
        self._failed_rounds = 0
        self._others_at: float | None = None  # time of the last look at the runs of other processes
        self._busy_until = 0.0  # time until which the part that is now sent may take
        self._thread: threading.Thread | None = None

    def follow(self, key: str) -> None:
        """Let the thread send a run's record and metrics whenever they change, until the run has ended."""
        with self._mutex:
            if key not in self._runs:
                self._runs[key] = Publication(self.root, key, self._announce), publish_lock(self.root, key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
                self._thread.start()

    def wait(self, key: str, is_cancelled: bool = False) -> bool:
        """Wait until the present record of a run is completely in MLflow and the rest of earlier runs was tried.

        The wait ends after several failures of MLflow, or if no part of the run is completed for WAIT_SECONDS longer
        than its upload should take.

        Args:
            is_cancelled: whether the wait ends after KILLED_SECONDS in any case.

        Returns:
            whether the run is completely in MLflow.
        """
        start, failed = time.monotonic(), self._failed_rounds
        while (is_waiting := load_record(self.root, key).is_waiting()) or self._others_at is None:
            end = start + KILLED_SECONDS if is_cancelled else max(start + WAIT_SECONDS, self._busy_until)
            if time.monotonic() > end or self._failed_rounds >= failed + _FAILED_ROUNDS:
                break
            time.sleep(0.1)
        return not is_waiting

    def _work(self) -> None:
        while True:
            problems = []
            for key, (publication, lock) in list(self._runs.items()):
                try:
                    if not lock.is_locked:
                        lock.acquire(timeout=0)
                    publication.run()
                except filelock.Timeout:  # another process publishes the run
                    pass
                except Exception as error:
                    problems.append(error_line(error))
                self._forget_if_ended(key)
            self._end_round(problems)
            with self._mutex:
                if not self._runs:
                    self._thread = None
                    return
            time.sleep(_POLL_SECONDS)

    def _end_round(self, problems: list[str]) -> None:
        """Publish the runs of other processes from time to time, and keep the first problem of the round."""
        if not problems and (self._others_at is None or time.monotonic() - self._others_at > _OTHERS_SECONDS):
            try:
                others = publish_waiting(self.root, tuple(self._runs), self._announce)
                problems += [other.problem for other in others if other.problem]
            except OSError as error:  # the records cannot be listed now
                problems.append(error_line(error))
            self._others_at = time.monotonic()
        if problems and problems[0] != self.problem:
            log.warning("tracking: MLflow does not answer (%s); the pipeline goes on, runs wait", problems[0])
        self.problem = problems[0] if problems else ""
        self._failed_rounds += bool(problems)

    def _forget_if_ended(self, key: str) -> None:
        with self._mutex, contextlib.suppress(OSError, ValueError):
            record = load_record(self.root, key)
            if record.status is not None and not record.is_waiting():
                _, lock = self._runs.pop(key)
                lock.release()

    def _announce(self, seconds: float) -> None:
        self._busy_until = time.monotonic() + seconds + WAIT_SECONDS


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
    root: StorePath, but: Sequence[str] = (), announce: Callable[[float], None] = lambda seconds: None
) -> list[Published]:
    """Publish the rest of earlier runs of this root, the oldest run first. An error of MLflow is part of the outcome.

    A run whose process was killed is ended.

    Args:
        but: keys of runs to leave out.
        announce: see `Publication`.

    Raises:
        OSError: the records cannot be listed.
    """
    return [_publish(root, key, record, announce) for key, record in waiting_records(root) if key not in but]


def _publish(root: StorePath, key: str, record: TrackedRun, announce: Callable[[float], None]) -> Published:
    lock, name = publish_lock(root, key), record.opening.name
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return Published(name, is_sending=True)
    publication, problem = Publication(root, key, announce), ""
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
            for path in (live_path(root, record), samples_path(root, key)):
                if path is not None and path.is_file():
                    signs_ms.append(int(path.stat().st_mtime * 1000))
            record.end("KILLED", max(signs_ms))
