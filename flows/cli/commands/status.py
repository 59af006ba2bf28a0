"""`athanor status`: list the newest runs of a root, what they are doing, and what they wait for."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import UTC

from dataset_builders.storage.store import StorePath
from flows.cli.text_table import print_table
from flows.prefect_server.runs import Run, Runs, served_runs, stored_runs
from flows.prefect_server.service_record import ServiceRecord, prefect_home, read_service

WAITING = "waiting for "  # start of a log line about what a run waits for
_RUNS = 20
_NEWEST_LOGS = 5
# A server that is not the root's, or a database that is no file of it.
_SERVERS = ("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")


def status_command(args: argparse.Namespace) -> int:
    """Print a table of the runs, the newest first."""
    service = read_service(args.root)
    serving = f"served by `athanor up` at {service.prefect_ui}" if service else "no `athanor up` serves it"
    print(f"root {args.root}: {serving}")
    with _runs_of(args.root, service) as runs:
        rows = [(run.name, run.state_name, _when(run), _now(runs, run)) for run in runs.newest(_RUNS)] if runs else []
    if rows:
        print_table("Runs", ("run", "state", "started (UTC)", "now"), rows, sys.stdout.isatty())
    else:
        print("it has no run yet")
    return 0


@contextlib.contextmanager
def _runs_of(root: StorePath, service: ServiceRecord | None) -> Iterator[Runs | None]:
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
    if run.state_type in ("PENDING", "PAUSED"):
        return f"waits: {run.message or run.state_name}"
    if run.state_type not in ("RUNNING", "CANCELLING"):
        took, message = f"took {run.seconds:,.0f} s", run.message.splitlines()
        return took if run.state_type == "COMPLETED" or not message else f"{took}: {message[0][:100]}"
    names = ", ".join(sorted(runs.running_tasks(run.id))) or "starting"
    lines = (line for line in runs.newest_logs(run.id, _NEWEST_LOGS) if line.startswith((WAITING, "got a slot")))
    newest = next(lines, "")
    return f"{names}: {newest}" if newest.startswith(WAITING) else names
