"""The tracking journal: what a pipeline run has to tell MLflow, on this machine's disk before anything is sent.

    <side_dir(root)>/tracking/<key>/journal.jsonl   one entry a line, in order, each synced before the call returns
    <side_dir(root)>/tracking/<key>/state.json      how far it was delivered, and to which MLflow run
    <side_dir(root)>/tracking/<key>/refused.jsonl   entries that MLflow will never take, with its reason

The key is the identity of the pipeline run, so a run that is tried again writes on in its journal. Whoever delivers
holds `send.lock`; whoever writes holds `append.lock` for the moment. A journal that was delivered to its `finish` is
removed; the state stays.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import psutil
from pydantic import BaseModel, ValidationError

from dataset_builders.contracts.files import write_text
from dataset_builders.contracts.store import StorePath, side_dir

FORMAT_VERSION = 1
JOURNAL, STATE, REFUSED = "journal.jsonl", "state.json", "refused.jsonl"
_SAME_START_SECONDS = 2.0  # two readings of a process's start differ by rounding
log = logging.getLogger("athanor.tracking")


@dataclass(frozen=True, slots=True)
class Entry:
    """One intent.

    Attributes:
        number: counts up in a journal, also over its removal.
        time_ms: when it was written, in milliseconds since 1970.
        op: name of the operation; `data` are its arguments, plain JSON.
        end: offset of the next line in the file.
    """

    number: int
    time_ms: int
    op: str
    data: dict[str, Any]
    end: int


class State(BaseModel):
    """How far a journal was delivered, and what the deliverer remembers of the MLflow run.

    Attributes:
        number, offset: of the last delivered entry, and of the byte after it.
        store: digest of the tracking store's address; another store gets the journal from its start.
        opened: arguments of the last `open`.
        first_ms, opened_ms, delivered_ms: when the run was opened for the first and the last time, and when the last
            delivered entry was written; milliseconds since 1970.
        stages: name -> directory of the artifact.
        finished: the last try has told its end.
    """

    format_version: int = FORMAT_VERSION
    number: int = 0
    offset: int = 0
    store: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    compare: list[str] = []
    opened: dict[str, Any] = {}
    first_ms: int | None = None
    opened_ms: int | None = None
    delivered_ms: int | None = None
    stages: dict[str, str] = {}
    scores: dict[str, dict[str, float | None]] = {}
    finished: bool = False


class Journal:
    """The journal of one pipeline run; take it from `journal_of`."""

    def __init__(self, directory: Path) -> None:
        self.dir, self.key = directory, directory.name
        self.path, self._state_path = directory / JOURNAL, directory / STATE
        self.samples_host = False  # whether the trainer runs on this machine
        self.sending = filelock.FileLock(directory / "send.lock", thread_local=False)
        self._mutex = threading.Lock()
        self._last = 0  # number of the last line, for a file of `_size` bytes
        self._size = -1

    def append(self, op: str, data: Mapping[str, Any]) -> int:
        """Write an entry and sync it; returns its number.

        Raises:
            OSError: it could not be written.
        """
        with self._mutex, self._writing():
            is_new = not self.path.exists()
            with self.path.open("ab") as file:
                self._catch_up(file.tell())
                entry = {"n": self._last + 1, "time_ms": now_ms(), "op": op, "data": data}
                file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._last, self._size = self._last + 1, file.tell()
            if is_new:
                _sync_dir(self.dir)
            return self._last

    def _catch_up(self, size: int) -> None:
        """See what another process has written, and cut off a line that a crash has left in part."""
        if size == self._size:
            return
        whole = 0
        self._last = max(self._last, self.load_state().number)
        for entry, end in self._lines(0):
            whole = end
            self._last = max(self._last, entry.number if entry else 0)
        if whole < size:
            os.truncate(self.path, whole)

    def _writing(self) -> filelock.BaseFileLock:
        self.dir.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.dir / "append.lock")

    def _lines(self, offset: int) -> Iterator[tuple[Entry | None, int]]:
        """Every whole line from an offset on, None for one that cannot be read, and the offset after it."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield _parse(line, offset), offset

    def waiting(self, state: State) -> Iterator[Entry]:
        """Entries that were not delivered, in order."""
        offset = state.offset if state.offset <= self.size() else 0
        for entry, _ in self._lines(offset):
            if entry is not None and entry.number > state.number:
                yield entry

    def count_waiting(self) -> int:
        """How many entries were not delivered."""
        return sum(1 for _ in self.waiting(self.load_state()))

    def size(self) -> int:
        """Bytes of the file; 0 without one."""
        return self.path.stat().st_size if self.path.exists() else 0

    def load_state(self) -> State:
        """A fresh one where there is none, or one that cannot be read: everything is then delivered again, which is
        the same as once."""
        try:
            state = State.model_validate_json(self._state_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, ValidationError):
            return State()
        return state if state.format_version == FORMAT_VERSION else State()

    def save_state(self, state: State) -> None:
        write_text(self._state_path, state.model_dump_json(indent=1) + "\n")

    def settle(self, state: State) -> bool:
        """Remove a journal that was delivered to its `finish`; returns whether it is gone."""
        with self._mutex, self._writing():
            if not state.finished or any(True for _ in self.waiting(state)):
                return False
            state.offset = 0
            self.save_state(state)
            self.path.unlink(missing_ok=True)
            return True

    def refuse(self, entries: list[Entry], reason: str) -> None:
        """Put entries aside that will never be taken."""
        lines = [{"n": e.number, "time_ms": e.time_ms, "op": e.op, "reason": reason, "data": e.data} for e in entries]
        with (self.dir / REFUSED).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


_journals: dict[Path, Journal] = {}
_journals_mutex = threading.Lock()


def journal_of(root: StorePath, key: str) -> Journal:
    """The journal of a key; the same object for all of this process."""
    directory = journals_dir(root) / key
    with _journals_mutex:
        return _journals.setdefault(directory, Journal(directory))


def journals_dir(root: StorePath) -> Path:
    """Where the journals of a root lie, on this machine."""
    return side_dir(root).resolve() / "tracking"


def journals_with_entries(root: StorePath) -> list[Journal]:
    """Those that hold something, by the time of their first entry."""
    found = []
    for path in journals_dir(root).glob(f"*/{JOURNAL}"):
        journal = journal_of(root, path.parent.name)
        first = next((entry.time_ms for entry in journal.waiting(journal.load_state())), 0)
        found.append((first, journal.key, journal))
    return [journal for *_, journal in sorted(found, key=lambda item: item[:2])]


def this_process() -> dict[str, Any]:
    """Names this process for ever: host, pid, start in seconds since 1970."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_dead(owner: Mapping[str, Any]) -> bool:
    """Whether a process of this host has ended; of another host's nobody knows."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(owner["pid"])
        is_other = abs(process.create_time() - owner["started"]) > _SAME_START_SECONDS
        return is_other or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _parse(line: bytes, end: int) -> Entry | None:
    try:
        values = json.loads(line)
        return Entry(values["n"], values["time_ms"], values["op"], values["data"], end)
    except (ValueError, KeyError, TypeError):
        return None


def _sync_dir(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
