"""Clean up after killed processes: end their orphans, settle their flow runs, release their slots.

Prefect never notices that a run's machine or worker was killed, so the run stays "Running" for ever. This module sets a
run of this root and host whose process has died to Crashed (or to Cancelled, if somebody had cancelled it), with a line
that says how to resume. A run that no process had started yet is scheduled again. Runs of other roots and hosts are
never changed.
"""

import logging
import re
import socket
from collections.abc import Iterator
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Scheduled

from dataset_builders.storage.store import StorePath, side_dir
from flows.prefect_server.processes import FLOW_RUN_VARIABLE, PART_VARIABLE, SERVICE_VARIABLE
from flows.prefect_server.service_record import POOL, read_record
from flows.resources.cancelling import CANCELLED
from flows.resources.limits import free_dead_slots, has_server
from flows.resources.run_record import RunRecord, forget_run, read_runs
from flows.service.orphans import end_orphans, living_flow_runs, marked_processes
from flows.tracking.tracker import Tracker

OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
DIED = "its process died; Retry resumes from the last checkpoint"
DIED_ALONE = "its process died; the same command resumes from the last checkpoint"
AGAIN = "its worker died before the run started; it is scheduled again"
_LABEL = "prefect.worker.name"
log = logging.getLogger("athanor.service")


def reconcile(root: StorePath) -> int:
    """Clean up a root, with the server of PREFECT_API_URL, or else with a temporary server on the root's database.

    This takes as long as orphaned trainers need to save.

    Returns:
        the number of flow runs that were settled.
    """
    end_orphans(root)
    dead = [record for record in read_runs(root) if record.is_dead()]
    if not dead and not has_server():
        return 0  # there is nothing to do, so no temporary server is started
    with get_client(sync_client=True) as client:
        free_dead_slots(client, root)
        settled = sum(_settle_record(client, root, record) for record in dead)
        if has_server():
            settled += sum(_settle_lost(client, run) for run in _lost_runs(client, root))
    return settled


def _settle_record(client: SyncPrefectClient, root: StorePath, record: RunRecord) -> int:
    settled = 0
    try:
        run = client.read_flow_run(UUID(record.flow_run_id))
        outermost = _outermost(client, run)
        is_pending = outermost.state.type == StateType.PENDING
        if not is_pending and str(outermost.id) not in living_flow_runs(marked_processes()):  # it is not being retried
            settled = sum(_settle(client, member) for member in _with_those_below(client, outermost))
            Tracker(root, record.tracking_run).finish("KILLED")
        elif run.id != outermost.id:  # a subflow run of the previous try; the new try has its own subflow runs
            settled = sum(_settle(client, member) for member in _with_those_below(client, run))
    except ObjectNotFound:  # the run was deleted, or is on another server
        pass
    forget_run(root, record)
    return settled


def _settle_lost(client: SyncPrefectClient, run: FlowRun) -> int:
    """Settle a run without a record, whose worker died before or just when the run's process started."""
    if run.state.type == StateType.PENDING:
        _set(client, run, Scheduled(message=AGAIN))
        return 1
    return sum(_settle(client, member) for member in _with_those_below(client, _outermost(client, run)))


def _settle(client: SyncPrefectClient, run: FlowRun) -> int:
    if run.state is None or run.state.type not in OPEN:
        return 0
    if run.state.type == StateType.CANCELLING:
        state = Cancelled(message=CANCELLED)
    else:
        state = Crashed(message=DIED if run.deployment_id else DIED_ALONE)
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN))),
    )
    for task in tasks:
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
        above = FlowRunFilterParentFlowRunId(any_=[member.id for member in generation])
        generation = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=above))


def _lost_runs(client: SyncPrefectClient, root: StorePath) -> list[FlowRun]:
    """Return the open flow runs that a dead worker of this root's service had taken and that have no process."""
    marked = marked_processes()
    living, recorded = living_flow_runs(marked), {record.flow_run_id for record in read_runs(root)}
    is_worker = {SERVICE_VARIABLE: str(side_dir(root)), PART_VARIABLE: "worker"}.items()
    starts = [
        process.create_time()
        for process, environment in marked.values()
        if is_worker <= environment.items() and FLOW_RUN_VARIABLE not in environment
    ]
    is_open = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)))
    in_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
    return [
        run
        for run in client.read_flow_runs(flow_run_filter=is_open, work_pool_filter=in_pool)
        if str(run.id) not in living | recorded
        and _was_ours(run.labels.get(_LABEL), root)
        # A run that the present worker has just taken has no process yet, but will have one soon.
        and not any(run.state.timestamp.timestamp() > start for start in starts)
    ]


def _was_ours(worker: object, root: StorePath) -> bool:
    """Whether a worker's name, athanor-<host>-<pid of its service>, belongs to this service or a dead one here."""
    match = re.fullmatch(r"athanor-(?P<host>.+)-(?P<pid>\d+)", str(worker))
    if match is None or match["host"] != socket.gethostname():
        return False
    service, pid = read_record(root), int(match["pid"])
    return not psutil.pid_exists(pid) or (service is not None and service.pid == pid)
