"""`athanor status`: list the newest runs of a root, what they are doing and wait for, and the bytes of the root. Say if
its worker is silent, and which schedules' runs will be refused.

The runs are read from a server, or from the database file that no server serves. A server on the file takes 13
processor seconds to start, and a second server beside that of a running `athanor run` would write into the same file.
So the file is read as it is, in the tables of Prefect 3.8.8; `tests/flows/prefect_server/test_runs.py` compares what is
read with what Prefect's own client reads. The client takes three seconds to import, so it is imported where a server is
asked.
"""

import argparse
import contextlib
import os
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import ROOT_MARK
from dataset_builders.storage.store import StorePath, is_local, side_dir
from flows.cli.terminal import bytes_text, print_table
from flows.pipeline.garbage import survey
from flows.pipeline.needs import live_runs, needs_of
from flows.service.programs import last_heartbeat, silence, worker_name
from flows.service.schedules import refused_schedules
from flows.tracking.servers import PREFECT_CLIENT_SECRET, ServiceRecord, prefect_home, read_service

WAITING = "waiting for "  # start of a log line about what a run waits for
_RUNS = 20
_NEWEST_LOGS = 5
# A server that is not the root's, or a database that is no file of it.
_SERVERS = ("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OUTERMOST = """
    SELECT run.id, run.name, run.state_type, run.state_name, state.message,
           run.start_time, run.expected_start_time, run.total_run_time
    FROM flow_run AS run JOIN flow_run_state AS state ON state.id = run.state_id
    WHERE run.parent_task_run_id IS NULL
    ORDER BY run.expected_start_time DESC LIMIT ?
"""
_NOT_ENDED = ("PAUSED", "SCHEDULED", "PENDING")  # states of runs that are not running
_WAITING = """
    SELECT id FROM flow_run
    WHERE parent_task_run_id IS NULL AND state_type IN (?, ?, ?)
          AND (start_time IS NOT NULL OR expected_start_time <= datetime('now'))
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


class Runs(Protocol):
    """Where the runs are read.

    `newest` returns the newest runs, `waiting` the ids of those that are to continue (suspended, resumed or retried)
    or whose time to start has come, `running_tasks` the names of a run's tasks that run, and `newest_logs` the last
    lines of a run's log, the newest first.
    """

    def newest(self, count: int) -> list[Run]: ...
    def waiting(self) -> set[str]: ...
    def running_tasks(self, run: str) -> list[str]: ...
    def newest_logs(self, run: str, count: int) -> list[str]: ...


def status_command(args: argparse.Namespace) -> int:
    """Print a table of the runs, the newest first, and one of the bytes of the root's directory on this machine."""
    service = read_service(args.root)
    serving = f"served by `athanor up` at {service.prefect_ui}" if service else "no `athanor up` serves it"
    print(f"root {args.root}: {serving}")
    if service is not None:
        login = os.environ.get(PREFECT_CLIENT_SECRET, "")
        if silent := silence(last_heartbeat(service.prefect_api, login, worker_name(service.pid))):
            print(f"worker: {silent}")
        for line in refused_schedules(service.prefect_api, login):
            print(line)
    with runs_of(args.root, service) as runs:
        rows = [(run.name, run.state_name, _when(run), _now(runs, run)) for run in runs.newest(_RUNS)] if runs else []
        waiting = runs.waiting() if runs else set()
    if rows:
        print_table("Runs", ("run", "state", "started (UTC)", "now"), rows, sys.stdout.isatty())
    else:
        print("it has no run yet")
    if (side_dir(args.root) / ROOT_MARK).is_file():
        _print_bytes(args.root, service, waiting)
    return 0


def _print_bytes(root: StorePath, service: ServiceRecord | None, waiting: set[str]) -> None:
    """Print the bytes of each stage on this machine, and what `athanor gc` would free if that is known without another
    program."""
    here = side_dir(root)
    live, needs = live_runs(here, waiting), []
    line = "`athanor gc` says what can be deleted" if is_local(root) else f"the artifacts are in {root}"
    has_own = os.environ.get("MLFLOW_TRACKING_URI") in (None, service and service.mlflow)
    is_known = is_local(root) and has_own and not (live.tracked or live.untracked)
    try:
        needs = needs_of(here, live, None) if is_known else []
    except InputError as error:
        is_known, line = False, f"`athanor gc` would refuse: {error}"
    found = survey(here, needs, live)
    line = f"`athanor gc` would free {bytes_text(found.freed)}" if is_known else line
    rows = [(name, bytes_text(size)) for name, size in found.sizes.most_common() if size]
    print_table(f"Bytes, {bytes_text(found.sizes.total())} in all", ("of", "bytes"), rows, sys.stdout.isatty())
    print(f"\n{line}")


@contextlib.contextmanager
def runs_of(root: StorePath, service: ServiceRecord | None) -> Iterator[Runs | None]:
    home = prefect_home(root)
    database = home / "prefect.db"
    has_server = service is not None or any(name in os.environ for name in _SERVERS)
    if has_server or (home.is_dir() and not database.is_file()):
        with served_runs() as runs:
            yield runs
    elif database.is_file():
        with stored_runs(database) as runs:
            yield runs
    else:
        yield None


def _when(run: Run) -> str:
    """Return the time at which a run started or will start."""
    return run.start.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if run.start else "-"


def _now(runs: Runs, run: Run) -> str:
    """Return the stage that runs now, what the run waits for, or the duration of a run that has ended."""
    if run.state_type == "SCHEDULED":
        return "waits for a free worker (`athanor up --max-runs`)" if run.is_due else "waits for its scheduled start"
    if run.state_type == "PAUSED":
        return "waits for Resume on Prefect's page"
    if run.state_type == "PENDING":
        return f"waits: {run.message or run.state_name}"
    if run.state_type not in ("RUNNING", "CANCELLING"):
        took, message = f"took {run.seconds:,.0f} s", run.message.splitlines()
        return took if run.state_type == "COMPLETED" or not message else f"{took}: {message[0][:100]}"
    names = ", ".join(sorted(runs.running_tasks(run.id))) or "starting"
    lines = (line for line in runs.newest_logs(run.id, _NEWEST_LOGS) if line.startswith((WAITING, "got a slot")))
    newest = next(lines, "")
    return f"{names}: {newest}" if newest.startswith(WAITING) else names


@contextlib.contextmanager
def stored_runs(database: Path) -> Iterator[Runs]:
    """Open Prefect's database file to read it.

    Raises:
        sqlite3.Error: it is no such database.
    """
    with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        yield _StoredRuns(connection)


@dataclass(frozen=True, slots=True)
class _StoredRuns:
    connection: sqlite3.Connection

    def _has_tables(self) -> bool:
        """Whether the first start was not interrupted before it made the tables."""
        return self.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'flow_run'").fetchone() is not None

    def newest(self, count: int) -> list[Run]:
        if not self._has_tables():
            return []
        runs = []
        for key, name, kind, state, message, start, expected, took in self.connection.execute(_OUTERMOST, (count,)):
            at = _time(start) or _time(expected)
            due = expected is not None and _time(expected) < datetime.now(UTC)
            # Prefect stores a duration as a time after 1970; the default of the table's column is a plain 0.
            seconds = 0.0 if took == "0" else (_time(took) - _EPOCH) / timedelta(seconds=1)
            runs.append(Run(key, name, kind, state, message or "", at, due, seconds))
        return runs

    def waiting(self) -> set[str]:
        if not self._has_tables():
            return set()
        return {str(UUID(key)) for (key,) in self.connection.execute(_WAITING, _NOT_ENDED)}

    def running_tasks(self, run: str) -> list[str]:
        return [name for (name,) in self.connection.execute(_TASKS, (run,))]

    def newest_logs(self, run: str, count: int) -> list[str]:
        return [message for (message,) in self.connection.execute(_LOGS, (run, count))]


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None


@contextlib.contextmanager
def served_runs() -> Iterator[Runs]:
    """Open a client of the server at PREFECT_API_URL, or of one that Prefect starts for this process."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield _ServedRuns(client)


@dataclass(frozen=True, slots=True)
class _ServedRuns:
    client: "SyncPrefectClient"

    def newest(self, count: int) -> list[Run]:
        from prefect.client.schemas.sorting import FlowRunSort

        # More than are wanted, because the flow runs inside a run are read too.
        found = self.client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=4 * count)
        return [
            Run(
                id=str(run.id),
                name=run.name,
                state_type=run.state.type.value,
                state_name=run.state.name,
                message=run.state.message or "",
                start=run.start_time or run.expected_start_time,
                is_due=run.expected_start_time is not None and run.expected_start_time < datetime.now(UTC),
                seconds=run.total_run_time.total_seconds(),
            )
            for run in found
            if run.parent_task_run_id is None and run.state is not None
        ][:count]

    def waiting(self) -> set[str]:
        from prefect.client.schemas.filters import FlowRunFilter

        chosen = FlowRunFilter.model_validate({"state": {"type": {"any_": _NOT_ENDED}}})
        found: list[FlowRun] = []
        while page := self.client.read_flow_runs(flow_run_filter=chosen, offset=len(found)):
            found += page
        starts = {run.id: run.start_time or run.expected_start_time for run in found if run.parent_task_run_id is None}
        return {str(key) for key, start in starts.items() if start is not None and start <= datetime.now(UTC)}

    def running_tasks(self, run: str) -> list[str]:
        from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter

        running = TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING"]}}})
        mine = FlowRunFilter.model_validate({"id": {"any_": [run]}})
        return [task.name for task in self.client.read_task_runs(flow_run_filter=mine, task_run_filter=running)]

    def newest_logs(self, run: str, count: int) -> list[str]:
        from prefect.client.schemas.filters import LogFilter
        from prefect.client.schemas.sorting import LogSort

        mine = LogFilter.model_validate({"flow_run_id": {"any_": [run]}})
        return [log.message for log in self.client.read_logs(mine, limit=count, sort=LogSort.TIMESTAMP_DESC)]
