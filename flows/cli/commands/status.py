"""`athanor status`: list the newest runs of a root, what they are doing, and what they wait for."""

import argparse
import sys
from datetime import UTC, datetime

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort

from flows.cli.text_table import print_table
from flows.prefect_server.home import prefect_home
from flows.prefect_server.service_record import read_service

WAITING = "waiting for "  # start of a log line about what a run waits for
_RUNS = 20
_READ = 4 * _RUNS  # more than are shown, since the flow runs inside a run are read too
_NEWEST_LOGS = 5


def status_command(args: argparse.Namespace) -> int:
    """Print a table of the runs, the newest first."""
    service = read_service(args.root)
    serving = f"served by `athanor up` at {service.prefect_ui}" if service else "no `athanor up` serves it"
    print(f"root {args.root}: {serving}")
    if service is None and not prefect_home(args.root).is_dir():
        print("it has no run yet")
        return 0
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=_READ)
        outermost = [run for run in runs if run.parent_task_run_id is None and run.state is not None][:_RUNS]
        rows = [(run.name, run.state.name, _when(run), _now(client, run)) for run in outermost]
    if rows:
        print_table("Runs", ("run", "state", "started (UTC)", "now"), rows, sys.stdout.isatty())
    else:
        print("it has no run yet")
    return 0


def _when(run: FlowRun) -> str:
    """Return the time at which a run started or will start."""
    start = run.start_time or run.expected_start_time
    return start.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if start else "-"


def _now(client: SyncPrefectClient, run: FlowRun) -> str:
    """Return the stage that runs now, what the run waits for, or the duration of a run that has ended."""
    if run.state.type == StateType.SCHEDULED:
        late = run.expected_start_time is not None and run.expected_start_time < datetime.now(UTC)
        return "waits for a free worker (`athanor up --max-runs`)" if late else "waits for its scheduled start"
    if run.state.type in (StateType.PENDING, StateType.PAUSED):
        return f"waits: {run.state.message or run.state.name}"
    if run.state.type not in (StateType.RUNNING, StateType.CANCELLING):
        took = f"took {run.total_run_time.total_seconds():,.0f} s"
        message = (run.state.message or "").splitlines()
        return took if run.state.type == StateType.COMPLETED or not message else f"{took}: {message[0][:100]}"
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    running = TaskRunFilterStateType(any_=[StateType.RUNNING])
    tasks = client.read_task_runs(
        flow_run_filter=mine, task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=running))
    )
    names = ", ".join(sorted(task.name for task in tasks)) or "starting"
    logs = client.read_logs(
        LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=_NEWEST_LOGS, sort=LogSort.TIMESTAMP_DESC
    )
    waits = next((log.message for log in logs if log.message.startswith((WAITING, "got a slot"))), "")
    return f"{names}: {waits}" if waits.startswith(WAITING) else names
