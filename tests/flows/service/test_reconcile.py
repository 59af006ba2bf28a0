"""Killed processes leave running flow runs and slots. All of them are cleaned up."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import flows  # noqa: F401  sets what Prefect reads at its import

# isort: split
import psutil
import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.exceptions import ObjectAlreadyExists
from prefect.runtime import flow_run
from prefect.states import Cancelling, Pending, Running

from flows.pipeline.run_record import RunRecord, read_runs, record_run, record_slot
from flows.service import reconcile
from flows.service.reconcile import reconcile as put_right
from flows.tracking.servers import POOL
from stages.shared.launchers.processes import Owner
from tests.helpers.service import wait_for

pytestmark = pytest.mark.promise(
    "Cancel, a deadline or kill -9 leaves a checkpoint and no process, and a retry gives an undisturbed run's losses."
)


def this_process() -> dict[str, object]:
    return Owner.of_this_process().model_dump()


@pytest.fixture
def dead_pid() -> dict[str, object]:
    """Return the fields of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    about = {**this_process(), "pid": child.pid, "pid_started": psutil.Process(child.pid).create_time()}
    child.communicate()
    return about


@flow
def noting(root: Path, tracking_run: str | None = None) -> str:
    record_run(root, tracking_run)
    return str(flow_run.id)


@task
def nothing() -> None: ...


@flow
def outer() -> str:
    nothing()
    return str(flow_run.id)


def one_within_another() -> dict[str, str]:
    """Return the ids of two finished flow runs; "inner" is a subflow run of "around"."""
    ids = {}

    @flow
    def inner() -> None:
        nothing()
        ids["inner"] = str(flow_run.id)

    @flow
    def around() -> None:
        inner()
        ids["around"] = str(flow_run.id)

    around()
    return ids


def note(root: Path, flow_run_id: str, owner: dict[str, object]) -> None:
    path = root / "service" / "runs" / f"{flow_run_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RunRecord(flow_run_id=flow_run_id, **owner).model_dump_json())


def state_of(flow_run_id: str) -> State:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(uuid.UUID(flow_run_id)).state


def force(flow_run_id: str, state: State) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(uuid.UUID(flow_run_id), state, force=True)


def tasks_of(client: SyncPrefectClient, flow_run_id: str) -> list[TaskRun]:
    of_flow = FlowRunFilter(id=FlowRunFilterId(any_=[uuid.UUID(flow_run_id)]))
    return client.read_task_runs(flow_run_filter=of_flow)


def test_a_run_is_noted_while_its_process_lives(tmp_path):
    flow_run_id = noting(tmp_path)
    (record,) = read_runs(tmp_path)
    assert record.flow_run_id == flow_run_id and record.pid == os.getpid() and not record.is_dead()
    assert put_right(tmp_path) == 0 and read_runs(tmp_path) == [record]


def test_nothing_is_noted_outside_a_flow(tmp_path):
    record_run(tmp_path)
    assert read_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Running(), StateType.CRASHED),
        (Cancelling(), StateType.CANCELLED),
        (State(type=StateType.COMPLETED), StateType.COMPLETED),
        (Pending(), StateType.PENDING),  # a retry is about to start
    ],
    ids=["running", "cancelling", "completed", "pending"],
)
def test_a_run_whose_process_is_dead_is_settled(tmp_path, dead_pid, before, after):
    flow_run_id = outer()
    force(flow_run_id, before)
    note(tmp_path, flow_run_id, dead_pid)
    assert put_right(tmp_path) == (before.type != after)
    state = state_of(flow_run_id)
    assert state.type == after and read_runs(tmp_path) == []
    if before.type != after:
        assert "resumes from the last checkpoint" in state.message


def test_a_cancelled_run_whose_worker_died_too_says_what_was_saved(tmp_path, dead_pid):
    flow_run_id = outer()
    force(flow_run_id, Cancelling())
    note(tmp_path, flow_run_id, {**dead_pid, "saved": "step 215 saved"})
    assert put_right(tmp_path) == 1
    assert state_of(flow_run_id).message == "step 215 saved; Retry resumes from it"


def test_a_run_of_another_host_is_not_touched(tmp_path, dead_pid):
    flow_run_id = outer()
    force(flow_run_id, Running())
    note(tmp_path, flow_run_id, {**dead_pid, "host": "elsewhere"})
    assert put_right(tmp_path) == 0
    assert state_of(flow_run_id).type == StateType.RUNNING and len(read_runs(tmp_path)) == 1


def test_tasks_and_flow_runs_within_are_settled_too(tmp_path, dead_pid):
    ids = one_within_another()
    for flow_run_id in ids.values():
        force(flow_run_id, Running())
    with get_client(sync_client=True) as client:

        def ended() -> list[TaskRun]:
            return [run for run in tasks_of(client, ids["inner"]) if run.state.is_completed()]

        (of_nothing,) = wait_for(ended, 60, "event that tells the server of the end of the task")
        client.set_task_run_state(of_nothing.id, Running(), force=True)
    note(tmp_path, ids["inner"], dead_pid)  # the subflow that was running when the process died
    assert put_right(tmp_path) == 2
    assert {state_of(flow_run_id).type for flow_run_id in ids.values()} == {StateType.CRASHED}
    with get_client(sync_client=True) as client:
        assert [run.state.type for run in tasks_of(client, ids["inner"])] == [StateType.CRASHED]


@pytest.mark.parametrize("is_begun", [True, False], ids=["running again", "about to"])
def test_what_was_within_a_dead_try_does_not_end_the_next_one(tmp_path, dead_pid, is_begun, monkeypatch):
    """This was seen on a loaded machine: a retried run became Crashed while it trained, and a second retry ran in
    parallel."""
    ids = one_within_another()
    force(ids["inner"], Running())
    force(ids["around"], Running() if is_begun else Pending())
    note(tmp_path, ids["inner"], dead_pid)
    note(tmp_path, ids["around"], this_process() if is_begun else dead_pid)  # the engine records its run as it starts
    monkeypatch.setattr(reconcile.Tracker, "finish", lambda *_: pytest.fail("its MLflow run is the new try's"))
    assert put_right(tmp_path) == 1
    assert state_of(ids["inner"]).type == StateType.CRASHED
    assert state_of(ids["around"]).type == (StateType.RUNNING if is_begun else StateType.PENDING)
    assert [record.flow_run_id for record in read_runs(tmp_path)] == ([ids["around"]] if is_begun else [])


def test_a_run_that_this_worker_settles_by_itself_is_left_alone(tmp_path, dead_pid):
    """A retry of a cancelled run, which a user may ask for once it is Cancelled, would be cancelled too."""
    ids = one_within_another()
    force(ids["around"], Cancelling())
    note(tmp_path, ids["inner"], dead_pid)
    assert put_right(tmp_path, active=[uuid.UUID(ids["around"])]) == 0
    assert state_of(ids["around"]).type == StateType.CANCELLING and len(read_runs(tmp_path)) == 1
    assert put_right(tmp_path) == 1 and state_of(ids["around"]).type == StateType.CANCELLED


def test_a_run_that_the_server_does_not_know_is_forgotten(tmp_path, dead_pid):
    note(tmp_path, str(uuid.uuid4()), dead_pid)
    assert put_right(tmp_path) == 0 and read_runs(tmp_path) == []


def test_the_slot_of_a_dead_holder_is_given_back(tmp_path, dead_pid):
    name, leases = f"gpu-{uuid.uuid4().hex[:8]}", []

    @flow
    def holder() -> str:
        record_slot(tmp_path, name, leases[-1])
        return str(flow_run.id)

    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(name, 2)
        for _ in range(2):
            answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", 60.0)
            leases.append(answer.json()["lease_id"])
            flow_run_id = holder()
        note(tmp_path, flow_run_id, {**dead_pid, "limit": name, "lease_id": leases[-1]})
        put_right(tmp_path)
        assert client.read_global_concurrency_limit_by_name(name).active_slots == 1
    (left,) = read_runs(tmp_path)
    assert left.pid == os.getpid() and left.lease_id == leases[0]


def test_the_runs_that_dead_workers_had_taken_are_settled_and_no_others(tmp_path, monkeypatch):
    worker = f"athanor-{reconcile.socket.gethostname()}-{os.getpid()}"
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))

        def taken(state: State, by: str = worker) -> uuid.UUID:
            run = client.create_flow_run(outer, state=state, work_pool_name=POOL)
            client.update_flow_run_labels(run.id, {"prefect.worker.name": by})
            return run.id

        waiting, running, stopping = taken(Pending()), taken(Running()), taken(Cancelling())
        of_another, active, alive = taken(Running(), "athanor-elsewhere-1"), taken(Running()), taken(Running())
        note(tmp_path, str(alive), this_process())
        assert put_right(tmp_path, worker, [active]) == 0, "this worker has just taken them"
        monkeypatch.setattr(reconcile.psutil.Process, "create_time", lambda _: time.time())
        monkeypatch.setattr(RunRecord, "is_dead", lambda _: False)
        assert put_right(tmp_path, worker, [active]) == 3
    settled = {waiting: "SCHEDULED", running: "CRASHED", stopping: "CANCELLED"}
    untouched = dict.fromkeys((of_another, active, alive), "RUNNING")
    expected = settled | untouched
    assert {run: state_of(str(run)).type.value for run in expected} == expected
    assert state_of(str(waiting)).message == reconcile.AGAIN


def test_whose_worker_it_was():
    host, mine = reconcile.socket.gethostname(), os.getpid()
    worker = f"athanor-{host}-{mine}"
    assert reconcile._was_ours(worker, worker), "an earlier worker of the same service"
    assert reconcile._was_ours(f"athanor-{host}-99999999", worker)
    assert not reconcile._was_ours(f"athanor-{host}-{os.getppid()}", worker)  # running, but not this root's service
    assert not reconcile._was_ours("athanor-elsewhere-99999999", worker)
    assert not reconcile._was_ours(None, worker)
