"""The flow runs that a server of Prefect knows."""

import contextlib
from collections.abc import Iterator
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
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort

from flows.prefect_server.stored_runs import Run


@contextlib.contextmanager
def served_runs() -> Iterator["ServedRuns"]:
    """Open a client of the server at PREFECT_API_URL, or of one that Prefect starts for this process."""
    with get_client(sync_client=True) as client:
        yield ServedRuns(client)


class ServedRuns:
    """The runs of an open client."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self.client = client

    def newest(self, count: int) -> list[Run]:
        """Return the newest runs."""
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

    def running_tasks(self, run: str) -> list[str]:
        """Return the names of a run's tasks that run."""
        running = TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING]))
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
        tasks = self.client.read_task_runs(flow_run_filter=mine, task_run_filter=TaskRunFilter(state=running))
        return [task.name for task in tasks]

    def newest_logs(self, run: str, count: int) -> list[str]:
        """Return the last lines of a run's log, the newest first."""
        mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
        return [log.message for log in self.client.read_logs(mine, limit=count, sort=LogSort.TIMESTAMP_DESC)]
