"""The flow runs in the database file of a root that no server serves.

A server on the file takes 13 processor seconds to start, and a second server beside the one of a running `athanor run`
would write into the same file. So the file is read as it is, in the tables of Prefect 3.8.8;
`tests/flows/prefect_server/test_stored_runs.py` compares what is read with what Prefect's own client reads.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OUTERMOST = """
    SELECT run.id, run.name, run.state_type, run.state_name, state.message,
           run.start_time, run.expected_start_time, run.total_run_time
    FROM flow_run AS run JOIN flow_run_state AS state ON state.id = run.state_id
    WHERE run.parent_task_run_id IS NULL
    ORDER BY run.expected_start_time DESC LIMIT ?
"""
_TASKS = "SELECT name FROM task_run WHERE flow_run_id = ? AND state_type = 'RUNNING'"
_LOGS = "SELECT message FROM log WHERE flow_run_id = ? ORDER BY timestamp DESC LIMIT ?"


@dataclass(frozen=True, slots=True)
class Run:
    """A flow run that no other flow run started.

    Attributes:
        state_type: Prefect's type of the state, as RUNNING.
        state_name: the name that Prefect's pages show, as Late.
        start: when it started, or else when it will; UTC.
        is_due: whether it should have started by now.
        seconds: how long it ran.
    """

    id: str
    name: str
    state_type: str
    state_name: str
    message: str
    start: datetime | None
    is_due: bool
    seconds: float


@contextlib.contextmanager
def stored_runs(database: Path) -> Iterator["StoredRuns"]:
    """Open Prefect's database file to read it.

    Raises:
        sqlite3.Error: it is no such database.
    """
    with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        yield StoredRuns(connection)


class StoredRuns:
    """The runs of an open database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def newest(self, count: int) -> list[Run]:
        """Return the newest runs; none if a first start was interrupted before it made the tables."""
        if not self.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'flow_run'").fetchone():
            return []
        runs = []
        for key, name, kind, state, message, start, expected, took in self.connection.execute(_OUTERMOST, (count,)):
            at = _time(start) or _time(expected)
            due = expected is not None and _time(expected) < datetime.now(UTC)
            # Prefect stores a duration as a time after 1970; the default of the table's column is a plain 0.
            seconds = 0.0 if took == "0" else (_time(took) - _EPOCH) / timedelta(seconds=1)
            runs.append(Run(key, name, kind, state, message or "", at, due, seconds))
        return runs

    def running_tasks(self, run: str) -> list[str]:
        """Return the names of a run's tasks that run."""
        return [name for (name,) in self.connection.execute(_TASKS, (run,))]

    def newest_logs(self, run: str, count: int) -> list[str]:
        """Return the last lines of a run's log, the newest first."""
        return [message for (message,) in self.connection.execute(_LOGS, (run, count))]


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None
