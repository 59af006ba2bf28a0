"""Who delivers journals: one thread a process while a pipeline runs, and anybody who replays what was left.

A journal is delivered in order, by one at a time. What may pass (MLflow is down, slow or full) is tried again, less and
less often; what MLflow will never take is put aside with its reason, and the rest goes on.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from dataset_builders.contracts.store import StorePath, side_dir
from stages.tracking_apply import Applier
from stages.tracking_journal import Entry, Journal, is_dead, journals_with_entries
from stages.tracking_store import is_gone, may_pass, store_digest

PATIENCE_SECONDS = 10.0  # without an answer
LONGEST_WAIT_SECONDS = 60.0
_FAILED_ROUNDS = 3
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
_OTHERS_SECONDS = 60.0  # between two looks at what other processes have left
_ROWS_AT_ONCE = 400
log = logging.getLogger("athanor.tracking")


class Delivery:
    """The delivering end of a journal; whoever has one holds the journal's lock."""

    def __init__(self, root: StorePath, journal: Journal, on_answer: Callable[[], None] = lambda: None) -> None:
        self.root, self.journal, self.on_answer = root, journal, on_answer
        self.state = journal.load_state()
        self.applier = Applier(root, self.state, on_answer)
        self.sent = 0

    def run(self) -> None:
        """Deliver what waits.

        Raises:
            Exception: what may pass by itself; that entry and all after it still wait.
        """
        if self.state.store not in ("", store_digest(self.root)):  # the new store has nothing of it
            self.state.number = self.state.offset = 0
            self.applier.forget()
        for group in _grouped(self.journal.waiting(self.state)):
            self._deliver(group)
            self.state.number, self.state.offset = group[-1].number, group[-1].end
            self.state.delivered_ms = group[-1].time_ms
            self.journal.save_state(self.state)
            self.sent += len(group)
            self.on_answer()

    def _deliver(self, group: list[Entry]) -> None:
        try:
            self._apply(group)
        except Exception as error:
            self.applier.forget()
            if may_pass(error):
                raise
            if len(group) > 1:  # find the one
                for entry in group:
                    self._deliver([entry])
                return
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            log.warning("tracking: MLflow will never take %s (%s); the pipeline goes on", group[0].op, reason)
            self.journal.refuse(group, reason)

    def _apply(self, group: list[Entry]) -> None:
        try:
            self.applier.apply(group)
        except Exception as error:
            if not (is_gone(error) and self.state.opened):
                raise
            self.applier.forget()
            self.applier.reopen()  # somebody has emptied the store, or put another in its place
            self.applier.apply(group)

    def end_what_was_killed(self) -> None:
        """A try whose process is gone without a word has ended; nobody else will say so."""
        owner, ended, last_ms = self.state.opened.get("owner"), self.state.finished, self.state.delivered_ms
        for entry in self.journal.waiting(self.state):
            last_ms = entry.time_ms
            if entry.op == "open":
                owner, ended = entry.data["owner"], False
            ended = ended or entry.op == "finish"
        if owner and not ended and is_dead(owner):
            self.journal.append("finish", {"status": "KILLED", "time_ms": last_ms})


def _grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries of metrics that follow each other together, the rest one by one."""
    group: list[Entry] = []
    for entry in entries:
        if group and (entry.op != "metrics" or sum(len(e.data["rows"]) for e in group) >= _ROWS_AT_ONCE):
            yield group
            group = []
        if entry.op == "metrics":
            group.append(entry)
        else:
            yield [entry]
    if group:
        yield group


class Sender:
    """The sending thread of this process for one root. Everything but `wait` returns at once."""

    def __init__(self, root: StorePath) -> None:
        self.root = root
        self.problem = ""  # of the last round, empty where all was delivered
        self._own: dict[str, Journal] = {}
        self._held: dict[str, Delivery] = {}
        self._changed = threading.Condition()
        self._is_dirty = False
        self._waiters = self._failed_rounds = 0
        self._others_at = 0.0
        self._progress = 0.0
        self._thread: threading.Thread | None = None

    def submit(self, journal: Journal) -> None:
        """There is something new in a journal of this process."""
        with self._changed:
            self._own.setdefault(journal.key, journal)
            self._is_dirty = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, journal: Journal, number: int, patience: float = PATIENCE_SECONDS) -> int:
        """Wait until an entry and all before it are delivered, and what others have left as well.

        Gives up after so many seconds without an answer of MLflow, when MLflow has failed several times meanwhile, or
        after LONGEST_WAIT_SECONDS.

        Returns:
            how many entries of the journal wait still.
        """
        start = time.monotonic()
        with self._changed:
            self._waiters += 1
            failed = self._failed_rounds
            self._changed.notify_all()
        try:
            while not self._is_through(journal, number):
                now = time.monotonic()
                is_stuck = now - max(start, self._progress) > patience or now - start > LONGEST_WAIT_SECONDS
                if is_stuck or self._failed_rounds - failed >= _FAILED_ROUNDS:
                    return journal.count_waiting()
                with self._changed:
                    self._changed.wait(0.1)
            return 0
        finally:
            with self._changed:
                self._waiters -= 1

    def _is_through(self, journal: Journal, number: int) -> bool:
        own = journal.size() == 0 or journal.load_state().number >= number
        return own and self._others_at > 0

    def has_failed(self) -> bool:
        """Whether MLflow has taken nothing so far, and failed."""
        return bool(self.problem)

    def _work(self) -> None:
        retry = _FIRST_RETRY
        while True:
            with self._changed:
                self._is_dirty = False
            is_busy = self._round()
            with self._changed:
                self._failed_rounds += bool(self.problem)
                self._changed.notify_all()
                if self.problem:
                    self._changed.wait_for(lambda: self._waiters, timeout=retry)
                    retry = min(2 * retry, _LAST_RETRY)
                else:
                    retry = _FIRST_RETRY
                    self._changed.wait_for(lambda: self._is_dirty, timeout=1.0 if is_busy else _OTHERS_SECONDS)
            if self.problem and self._waiters:
                time.sleep(_FIRST_RETRY)
                retry = _FIRST_RETRY

    def _round(self) -> bool:
        """Deliver what can be delivered; returns whether another process delivers a journal of this one."""
        problems, is_busy = [], False
        for journal in list(self._own.values()):
            try:
                is_busy |= not self._deliver_own(journal)
            except Exception as error:
                problems.append(_one_line(error))
        if not problems and (self._others_at == 0 or time.monotonic() - self._others_at > _OTHERS_SECONDS):
            left = replay_waiting(self.root, tuple(self._own), self._advance)
            problems += [one.problem for one in left if one.problem]
            self._others_at = time.monotonic()
        if problems and problems[0] != self.problem:
            log.warning("tracking: MLflow does not answer (%s); the pipeline goes on, entries wait", problems[0])
        self.problem = problems[0] if problems else ""
        return is_busy

    def _deliver_own(self, journal: Journal) -> bool:
        delivery = self._held.get(journal.key)
        if delivery is None:
            if journal.size() == 0:
                return True
            try:
                journal.sending.acquire(timeout=0)
            except filelock.Timeout:
                return False
            delivery = self._held[journal.key] = Delivery(self.root, journal, self._advance)
        delivery.run()
        if journal.settle(delivery.state):
            del self._held[journal.key]
            journal.sending.release()
        return True

    def _advance(self) -> None:
        self._progress = time.monotonic()
        with self._changed:
            self._changed.notify_all()


_senders: dict[Path, Sender] = {}
_senders_mutex = threading.Lock()


def sender_of(root: StorePath) -> Sender:
    """The sender of a root; the same for all of this process."""
    with _senders_mutex:
        return _senders.setdefault(side_dir(root).resolve(), Sender(root))


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a journal.

    Attributes:
        name: of the MLflow run.
        sent, waiting: entries.
        problem: why the rest waits; empty where nothing does, or the run itself sends.
        is_sending: its own process delivers it.
    """

    key: str
    name: str
    sent: int
    waiting: int
    problem: str = ""
    is_sending: bool = False


def replay_waiting(
    root: StorePath, but: Sequence[str] = (), on_answer: Callable[[], None] = lambda: None
) -> list[Replayed]:
    """Deliver what earlier runs of this root have left, the oldest first; never raises.

    A run whose process was killed gets its end.

    Args:
        but: keys of journals to leave alone.
        on_answer: is called whenever MLflow has answered or an entry is delivered.
    """
    done: list[Replayed] = []
    try:
        for journal in journals_with_entries(root):
            if journal.key not in but:
                done.append(_replay(root, journal, on_answer))
    except Exception as error:
        log.warning("tracking: the journals of %s cannot be read (%s)", root, _one_line(error))
    return done


def _replay(root: StorePath, journal: Journal, on_answer: Callable[[], None]) -> Replayed:
    try:
        journal.sending.acquire(timeout=0)
    except filelock.Timeout:
        return Replayed(journal.key, _name(journal), 0, journal.count_waiting(), is_sending=True)
    try:
        delivery, problem = Delivery(root, journal, on_answer), ""
        try:
            delivery.end_what_was_killed()
            delivery.run()
            journal.settle(delivery.state)
        except Exception as error:
            problem = _one_line(error)
        return Replayed(journal.key, _name(journal), delivery.sent, journal.count_waiting(), problem)
    finally:
        journal.sending.release()


def _name(journal: Journal) -> str:
    opened = [entry.data["name"] for entry in journal.waiting(journal.load_state()) if entry.op == "open"]
    return (opened or [journal.load_state().opened.get("name", journal.key)])[-1]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
