"""The nightly deployment, set to every minute, starts by itself; two parallel runs equal separate ones; a schedule with
parameters of an older form says why its runs are refused."""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import CronSchedule

from stages.shared.launchers.config import ClusterConfig
from tests.helpers.service import RunningService, lines, request, run_athanor, running_service, wait_for
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A schedule fires, two flow runs at once are each as alone, and eight processes write to MLflow's store, "
        "on SQLite and Postgres."
    ),
]
FIRES_SECONDS = 120  # at most a minute to the next start, and time for server and worker to react on a loaded machine
RUN_SECONDS = 480
RATES = (0.001, 0.003)


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """Run a service like the shared one, but two runs may train at once, and the server checks schedules every 5 s
    instead of 60 s."""
    often = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5"}
    options = ["--limit", f"{ClusterConfig().limit}=2"]
    with running_service(tmp_path_factory.mktemp("service") / "root", options, often) as running:
        yield running


@pytest.fixture
def client(service):
    with SyncPrefectClient(service.record.prefect_api, auth_string=service.login) as client:
        yield client


def test_a_schedule_of_every_minute_fires_and_its_run_completes(service, client):
    nightly = client.read_deployment_by_name("vlm-sft/vlm-sft-nightly")
    (schedule,) = nightly.schedules
    of_nightly = DeploymentFilter(id=DeploymentFilterId(any_=[nightly.id]))
    client.update_deployment_schedule(
        nightly.id,
        schedule.id,
        active=True,
        schedule=CronSchedule(cron="* * * * *", timezone="UTC"),
        parameters={"set": lines(SMALL)},
    )

    def fired() -> FlowRun | None:
        begun = [run for run in client.read_flow_runs(deployment_filter=of_nightly) if run.start_time is not None]
        return min(begun, key=lambda run: run.start_time, default=None)

    run = wait_for(fired, FIRES_SECONDS, "scheduled flow run that has begun", service.tell)
    assert run.auto_scheduled and run.expected_start_time.second == 0
    client.update_deployment_schedule(nightly.id, schedule.id, active=False)  # one run is enough

    service.end_of(run.id, RUN_SECONDS)
    last = client.read_flow_run(run.id)
    assert last.state.is_completed(), last.state.message
    assert last.name.startswith("embedded num_scans=40") and list((service.root / "artifacts").glob("evaluate/*"))
    status, numbers = request(f"{service.record.mlflow}/metrics", login=service.login)
    success = re.search(rb"^athanor_nightly_last_success_timestamp_seconds (\S+)$", numbers, re.MULTILINE)
    assert status == 200 and float(success[1]) == pytest.approx(last.end_time.timestamp(), abs=1)
    print(f"late by {(run.start_time - run.expected_start_time).total_seconds():.1f} s, ran {last.total_run_time}")


def test_two_flow_runs_at_once_are_each_as_alone(service, client, tmp_path):
    before = {path.name for path in (service.root / "artifacts" / "evaluate").glob("*")}
    ids = [service.start_run("vlm-sft", {**SMALL, "train.optim.lr": rate}) for rate in RATES]
    for run_id in ids:
        service.end_of(run_id, RUN_SECONDS)
    runs = [client.read_flow_run(run_id) for run_id in ids]
    assert [run.state.name for run in runs] == ["Completed", "Completed"], service.tell()
    assert max(run.start_time for run in runs) < min(run.end_time for run in runs)  # they really ran in parallel

    for rate in RATES:
        done = run_athanor("run", tmp_path / "alone", train__optim__lr=rate)
        assert done.returncode == 0, done.stderr
    together, apart = _outcomes(service.root, before), _outcomes(tmp_path / "alone", set())
    assert together == apart and len({digest for digest, _ in apart.values()}) == 2
    with sqlite3.connect(service.root / "mlflow.db") as database:  # MLflow has complete curves, of a nightly run too
        counts = database.execute("SELECT count(*) FROM metrics WHERE key = 'loss' GROUP BY run_uuid").fetchall()
    assert set(counts) == {(SMALL["train.num_steps"],)} and len(counts) >= len(ids)


def _outcomes(root: Path, before: set[str]) -> dict[str, tuple[str, object]]:
    """Return fingerprint of each exported model -> (digest of its weights, its scores), without earlier evaluations."""
    found = {}
    for path in (root / "artifacts" / "evaluate").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        answered = root / "artifacts" / "answer" / manifest["parents"]["answers"]["fingerprint"] / "manifest.json"
        model = json.loads(answered.read_text())["parents"]["hf"]
        if model["name"] != "export" or path.parent.name in before:
            continue  # the model before training
        exported = model["fingerprint"]
        weights = root / "artifacts" / "export" / exported / "hf" / "model.safetensors"
        found[exported] = (hashlib.sha256(weights.read_bytes()).hexdigest(), manifest["stats"]["scores"])
    assert len(found) == len(RATES)
    return found


@pytest.mark.promise(
    "A schedule whose stored parameters no longer fit is named by `athanor up` and `athanor status`, and its runs say "
    "why they are refused."
)
def test_a_schedule_with_parameters_of_an_older_form_is_named_before_and_after_its_nights(service, client):
    nightly = client.read_deployment_by_name("vlm-sft/vlm-sft-nightly")
    older = {"parameters": {"config": {"train": {}}}, "enforce_parameter_schema": False}
    client.update_deployment(nightly.id, DeploymentUpdate(**older))
    schedule = {"active": True, "schedule": CronSchedule(cron="* * * * *", timezone="UTC"), "parameters": {}}
    client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, **schedule)
    of_nightly = DeploymentFilter(id=DeploymentFilterId(any_=[nightly.id]))

    def refused() -> list[FlowRun]:
        return [run for run in client.read_flow_runs(deployment_filter=of_nightly) if run.state.name == "Refused"]

    runs = wait_for(lambda: len(refused()) > 1 and refused(), 2 * FIRES_SECONDS, "two refused runs", service.tell)
    reason = "no parameter is called 'config', only recipe, name, settings, set; edit the parameters of the schedule"
    assert all(run.state.message.startswith(reason) for run in runs)
    told = f"schedule nightly of vlm-sft-nightly: its runs will be refused: {reason}"
    assert told in service.athanor("status").stdout
    service.stop()
    with running_service(service.root) as again:
        wait_for(lambda: any(line.startswith(told) for line in again.printed()), 30, told, again.tell)
