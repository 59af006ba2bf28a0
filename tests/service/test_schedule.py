"""Must-show 2: the nightly deployment, switched on and set to every minute, fires by itself and completes."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import CronSchedule

from tests.helpers.service import RunningService, wait_for

pytestmark = pytest.mark.slow
FIRES_SECONDS = 120  # at most a minute to the next one, and time for server and worker to notice on a loaded machine
RUN_SECONDS = 480
OVERRIDES = {
    "data": {"num_scans": 40, "num_multi": 8, "num_pairs": 8, "num_texts": 8},
    "convert": {"heldout_fraction": 0.3},
    "train": {"num_steps": 5, "optim": {"lr": 0.002, "warmup_steps": 1}},
    "evaluate": {"max_new_tokens": 2},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """As the shared one, with a server that looks for new schedules every five seconds instead of every sixty."""
    often = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5"}
    running = RunningService(tmp_path_factory.mktemp("service") / "root", environment=often)
    yield running
    running.stop()


@pytest.fixture
def client(service):
    with SyncPrefectClient(service.record.prefect_api) as client:
        yield client


@pytest.fixture
def nightly(client):
    return client.read_deployment_by_name("vlm-sft/vlm-sft-nightly")


def runs_of(client: SyncPrefectClient, deployment) -> list[FlowRun]:
    return client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])))


def test_the_nightly_is_off_until_somebody_switches_it_on(client, nightly):
    (schedule,) = nightly.schedules
    assert schedule.schedule.cron == "0 2 * * *" and schedule.active is False and not nightly.paused
    assert not runs_of(client, nightly)


def test_a_schedule_of_every_minute_fires_and_its_run_completes(service, client, nightly):
    (schedule,) = nightly.schedules
    client.update_deployment_schedule(
        nightly.id,
        schedule.id,
        active=True,
        schedule=CronSchedule(cron="* * * * *", timezone="UTC"),
        parameters={"overrides": OVERRIDES},
    )

    def fired() -> FlowRun | None:
        begun = [run for run in runs_of(client, nightly) if run.start_time is not None]
        return min(begun, key=lambda run: run.start_time, default=None)

    run = wait_for(fired, FIRES_SECONDS, "scheduled flow run that has begun", service.tell)
    assert run.auto_scheduled and run.expected_start_time.second == 0
    check_that_a_restart_keeps_the_schedule(service, client, nightly)
    client.update_deployment_schedule(nightly.id, schedule.id, active=False)  # one run is enough

    def ended() -> FlowRun | None:
        now = client.read_flow_run(run.id)
        return now if now.state.is_final() else None

    last = wait_for(ended, RUN_SECONDS, "end of the scheduled flow run", service.tell)
    assert last.state.is_completed(), last.state.message
    assert last.name.startswith("embedded num_scans=40") and list((service.root / "artifacts").glob("evaluate/*"))
    print(f"late by {(run.start_time - run.expected_start_time).total_seconds():.1f} s, ran {last.total_run_time}")


def check_that_a_restart_keeps_the_schedule(service: RunningService, client: SyncPrefectClient, nightly) -> None:
    """`athanor up` registers at every start."""
    command = [sys.executable, "-m", "flows.deployments", "--root", str(service.root)]
    subprocess.run(command, env=service.env(), check=True, timeout=120)
    after = client.read_deployment(nightly.id)
    (schedule,) = after.schedules
    assert schedule.active and schedule.schedule.cron == "* * * * *" and schedule.parameters == {"overrides": OVERRIDES}
