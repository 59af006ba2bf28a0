"""A run that a person cancels, suspends, pauses or deletes: its training saves, and the run keeps the state that the
person gave it."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

import flows  # noqa: F401  sets what Prefect reads at its import

# isort: split
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelling, Paused, Scheduled, Suspended

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.store import StorePath
from flows.pipeline import prefect_changes, run_record, tasks
from flows.pipeline.flow import run_steps
from flows.pipeline.plan import Plan
from flows.pipeline.prefect_changes import suspendable
from flows.pipeline.recipe import load_recipe
from flows.pipeline.run_record import read_runs, record_run, take_saved
from flows.pipeline.steps import PREPARE_DATA, Step
from stages.shared.artifacts.artifact import Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from tests.helpers.patience import at_most
from tests.helpers.service import wait_for
from trainer.contract.names import RESULT_JSON
from trainer.contract.result import TrainResult

pytestmark = pytest.mark.promise(
    "Cancel, a deadline or kill -9 leaves a checkpoint and no process, and a retry gives an undisturbed run's losses."
)
TRAINS = threading.Event()


class Settings(StrictModel):
    """A stage without settings."""


def _train(config: Settings, inputs: Mapping[str, object], work: StorePath, resources: StageResources) -> StageOutput:
    TRAINS.set()
    try:
        time.sleep(at_most(60))
    except BaseException:  # as run_trainer, whose launcher lets the trainer save
        result = TrainResult(status="stopped", step=215, checkpoint="checkpoints/step-000215")
        (work / RESULT_JSON).write_text(result.model_dump_json())
        raise
    return StageOutput()


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., dict[str, uuid.UUID]]]:
    """Return a function that runs a training in a flow run "inner" of the flow run "outer", and presses a button when
    the training has begun. It returns the ids of the flow runs, and the exception that ended the outer one."""
    monkeypatch.setattr(prefect_changes, "WATCH_SECONDS", 0.1)
    plan = Plan.open(load_recipe(), tmp_path)
    plan._steps = [Step(PREPARE_DATA, "train", Stage("of_this_file", 1, _train), Settings(), {})]
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # Prefect sends itself the signal again at the end of a run
    TRAINS.clear()

    def start(press: Callable[[uuid.UUID], None]) -> dict[str, object]:
        told: dict[str, object] = {}

        def inner() -> None:
            told["inner"] = uuid.UUID(flow_run.id)
            run_steps(plan, PREPARE_DATA, None)

        def outer() -> None:
            told["outer"] = uuid.UUID(flow_run.id)
            record_run(tmp_path)  # as the engine of a service does
            with suspendable():
                flow(inner, name="inner")()

        def when_it_trains() -> None:
            TRAINS.wait(at_most(60))
            press(told["outer"])

        button = threading.Thread(target=when_it_trains)
        button.start()
        try:
            flow(outer, name="outer")()
        except BaseException as error:
            told["error"] = error
        button.join()
        return told

    yield start
    signal.signal(signal.SIGTERM, before)


def set_to(state: State) -> Callable[[uuid.UUID], None]:
    def press(run: uuid.UUID) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, state, force=True)  # Prefect suspends no run without a deployment

    return press


def task_of(client: SyncPrefectClient, run: uuid.UUID) -> TaskRun | None:
    """Return the task run of a flow run when the server knows its end, of which it learns by an event."""
    found = client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run]}}))
    return next((task for task in found if task.state.is_final()), None)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (Suspended(timeout_seconds=3600), "Suspended"),
        (Paused(timeout_seconds=3600), "Suspended"),
        (Scheduled(name="Resuming"), "Resuming"),  # resumed before the watch saw that it was suspended
    ],
    ids=["suspend", "pause", "suspend and resume"],
)
def test_a_suspended_run_saves_ends_and_keeps_its_state(start, tmp_path, state, name):
    told = start(set_to(state))
    assert isinstance(told["error"], Pause), told["error"]
    with get_client(sync_client=True) as client:
        outer, inner = (client.read_flow_run(told[which]).state for which in ("outer", "inner"))
        task = wait_for(lambda: task_of(client, told["inner"]), 60, "end of the task")
    assert outer.name == name and (outer.type == StateType.SCHEDULED or outer.state_details.pause_reschedule)
    assert outer.type == StateType.SCHEDULED or outer.state_details.pause_timeout is not None
    assert (inner.type, inner.message) == (StateType.CANCELLED, "suspended; Resume continues from the last checkpoint")
    assert (task.state.type, task.state.message) == (StateType.CANCELLED, "step 215 saved")
    assert take_saved(tmp_path, str(told["outer"])) == "", "no worker sets it to Cancelled"


def test_a_deleted_run_saves_and_ends(start):
    def delete(run: uuid.UUID) -> None:
        with get_client(sync_client=True) as client:
            client.delete_flow_run(run)

    assert isinstance(start(delete)["error"], Pause)


def test_a_cancelled_run_is_shown_as_cancelled_with_the_step_that_it_saved(start, tmp_path, monkeypatch):
    for module in (prefect_changes, tasks):
        monkeypatch.setattr(module, "asked_to_stop", Cancelling)  # as the server of a worker says
    told = start(lambda _run: os.kill(os.getpid(), signal.SIGTERM))
    assert isinstance(told["error"], TerminationSignal), told["error"]
    with get_client(sync_client=True) as client:
        task = wait_for(lambda: task_of(client, told["inner"]), 60, "end of the task")
    assert (task.state.type, task.state.message) == (StateType.CANCELLED, "step 215 saved")
    of_outer = tmp_path / "service" / "runs" / f"{told['outer']}.json"
    run_record._forget_own(of_outer, os.getpid())  # at the end of the process
    assert len(read_runs(tmp_path)) == 2, "the worker has to read it"
    assert take_saved(tmp_path, str(told["outer"])) == "step 215 saved"
    assert take_saved(tmp_path, str(told["outer"])) == "" and len(read_runs(tmp_path)) == 1
