"""Settle what killed processes have left in Prefect and MLflow: their flow runs, and their slots.

Prefect never notices that a run's machine or worker was killed, so the run stays "Running" for ever. This module sets a
run of this root and host whose process has died to Crashed (or to Cancelled, if somebody had cancelled it), with a line
that says how to resume. A run that no process had started yet is scheduled again. Runs of other roots and hosts are
never changed.

A process that runs a flow writes a record when it starts and removes it when it ends (`flows/pipeline/run_record.py`).
So a record whose process is dead is of a killed process. A worker reconciles at each heartbeat, `athanor run` at its
start.
"""

import logging
import re
import socket
from collections.abc import Collection, Iterator
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Scheduled

from dataset_builders.storage.store import StorePath
from flows.pipeline.limits import free_dead_slots
from flows.pipeline.prefect_changes import cancelled_message
from flows.pipeline.run_record import RunRecord, forget_run, read_runs
from flows.tracking.servers import POOL
from flows.tracking.tracker import Tracker

OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
IS_OPEN = {"state": {"type": {"any_": OPEN}}}
DIED = "its process died; Retry resumes from the last checkpoint"
DIED_ALONE = "its process died; the same command resumes from the last checkpoint"
AGAIN = "its worker died before the run started; it is scheduled again"
_LABEL = "prefect.worker.name"
log = logging.getLogger("athanor.service")


def reconcile(root: StorePath, worker: str | None = None, active: Collection[UUID] = ()) -> int:
    """Clean up a root, with the server of PREFECT_API_URL, or else with a temporary server on the root's database.

    Args:
        worker: name of the worker of this process, which also settles the runs that dead workers had taken.
        active: ids of the flow runs that this process's worker settles by itself.

    Returns:
        the number of flow runs that were settled.
    """
    dead = [record for record in read_runs(root) if record.is_dead()]
    if not dead and not worker:
        return 0  # there is nothing to do, so no temporary server is started
    with get_client(sync_client=True) as client:
        free_dead_slots(client, root)
        settled = sum(_settle_record(client, root, record, active) for record in dead)
        # Runs without a record, whose worker died before or just when the run's process started.
        for run in _lost_runs(client, root, worker, active) if worker else ():
            if run.state.type == StateType.PENDING:
                _set(client, run, Scheduled(message=AGAIN))
                settled += 1
            else:
                settled += sum(_settle(client, member) for member in _with_those_below(client, _outermost(client, run)))
    return settled


def _settle_record(client: SyncPrefectClient, root: StorePath, record: RunRecord, active: Collection[UUID]) -> int:
    settled = 0
    try:
        run = client.read_flow_run(UUID(record.flow_run_id))
        outermost = _outermost(client, run)
        if outermost.id in active:
            return 0
        is_pending = outermost.state.type == StateType.PENDING
        living = {other.flow_run_id for other in read_runs(root) if not other.is_dead()}
        if not is_pending and str(outermost.id) not in living:  # it is not being retried
            settled = sum(_settle(client, member, record.saved) for member in _with_those_below(client, outermost))
            Tracker(root, record.tracking_run).finish("KILLED")
        elif run.id != outermost.id:  # a subflow run of the previous try; the new try has its own subflow runs
            settled = sum(_settle(client, member) for member in _with_those_below(client, run))
    except ObjectNotFound:  # the run was deleted, or is on another server
        pass
    forget_run(root, record)
    return settled


def _settle(client: SyncPrefectClient, run: FlowRun, saved: str = "") -> int:
    if run.state is None or run.state.type not in OPEN:
        return 0
    if run.state.type == StateType.CANCELLING:
        state = Cancelled(message=cancelled_message(saved))
    else:
        state = Crashed(message=DIED if run.deployment_id else DIED_ALONE)
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run.id]}})
    is_open = TaskRunFilter.model_validate(IS_OPEN)
    for task in client.read_task_runs(flow_run_filter=of_run, task_run_filter=is_open):
        client.set_task_run_state(task.id, state, force=True)
    _set(client, run, state)
    return 1


def _set(client: SyncPrefectClient, run: FlowRun, state: State) -> None:
    log.warning("flow run %s: %s, %s", run.name, state.name, state.message)
    client.set_flow_run_state(run.id, state, force=True)


def _outermost(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    """Return the outermost flow run, which has a process of its own."""
    while run.parent_task_run_id is not None:
        parent = client.read_task_run(run.parent_task_run_id).flow_run_id
        if parent is None:
            break
        run = client.read_flow_run(parent)
    return run


def _with_those_below(client: SyncPrefectClient, run: FlowRun) -> Iterator[FlowRun]:
    """Yield a flow run and all its subflow runs, which died together."""
    generation = [run]
    while generation:
        yield from generation
        above = {"any_": [member.id for member in generation]}
        below = FlowRunFilter.model_validate({"parent_flow_run_id": above})
        generation = client.read_flow_runs(flow_run_filter=below)


def _lost_runs(client: SyncPrefectClient, root: StorePath, worker: str, active: Collection[UUID]) -> list[FlowRun]:
    """Return the open flow runs that a dead worker of this root's service had taken and that have no process."""
    recorded = {UUID(record.flow_run_id) for record in read_runs(root)}
    start = psutil.Process().create_time()
    is_open = FlowRunFilter.model_validate(IS_OPEN)
    in_pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    return [
        run
        for run in client.read_flow_runs(flow_run_filter=is_open, work_pool_filter=in_pool)
        if run.id not in recorded | set(active)
        and _was_ours(run.labels.get(_LABEL), worker)
        # A run that this worker has just taken has no process yet, but will have one soon.
        and run.state.timestamp.timestamp() <= start
    ]


def _was_ours(name: object, worker: str) -> bool:
    """Whether a worker's name, athanor-<host>-<pid of its service>, is this worker's or of a dead service here."""
    match = re.fullmatch(r"athanor-(?P<host>.+)-(?P<pid>\d+)", str(name))
    if match is None or match["host"] != socket.gethostname():
        return False
    return name == worker or not psutil.pid_exists(int(match["pid"]))
