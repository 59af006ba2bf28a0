"""The runs read from Prefect's database file are those that Prefect's client is told by a server."""

import os
import sqlite3
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, get_run_logger, task
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import Cancelling, Completed, Running, Scheduled, Suspended

from flows.cli.backup import copy_database
from flows.cli.status import served_runs, stored_runs
from flows.libraries.prefect_private import make_idle
from flows.service.prometheus import RootNumbers
from flows.tracking.servers import NIGHTLY
from tests.helpers.patience import at_most


@pytest.fixture
def database() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "prefect.db"


def test_the_file_says_what_the_client_says(database):
    seen = []

    @task
    def looks():
        get_run_logger().info("waiting for a slot")

    @task(name="reads")
    def reads():
        looks()
        with served_runs() as served, stored_runs(database) as stored:
            (run,) = (run for run in stored.newest(5) if run.name == "goes-on")
            # Prefect tells its server of a task's state a little later: `reads` may not run yet, and `looks` still run.
            deadline = time.monotonic() + at_most(20)
            names: tuple[list[str], list[str]] = [], []
            while [len(found) for found in names] != [1, 1] and time.monotonic() < deadline:
                time.sleep(0.1)
                names = stored.running_tasks(run.id), served.running_tasks(run.id)
            seen.append(names)
            seen.append((run.state_type, run.is_due))

    @flow(name="goes-on", flow_run_name="goes-on")
    def goes_on():
        reads()

    @flow(name="ends", flow_run_name="ends")
    def ends():
        raise ValueError("no more")

    goes_on()
    with pytest.raises(ValueError, match="no more"):
        ends()
    (stored_names, served_names), state = seen
    assert stored_names == served_names and len(stored_names) == 1 and stored_names[0].startswith("reads")
    assert state == ("RUNNING", True)
    with served_runs() as served, stored_runs(database) as stored:
        tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
        served.client.create_flow_run(goes_on, name="later", state=tomorrow)
        ours, theirs = stored.newest(3), served.newest(3)
        assert [run.name for run in ours] == ["later", "ends", "goes-on"]
        assert ours == theirs
        assert "no more" in ours[1].message and not ours[0].is_due
        for state in (Suspended(), Scheduled()):  # and then resumed
            served.client.set_flow_run_state(UUID(ours[1].id), state, force=True)
            assert ours[1].id in stored.waiting() and stored.waiting() == served.waiting()
            assert not {ours[0].id, ours[2].id} & stored.waiting()
        logs = [store.newest_logs(ours[2].id, 9) for store in (stored, served)]
        assert logs[0] == logs[1]


@pytest.mark.promise("A backup made while runs go on is a root that can be served, and whose runs register.")
def test_no_run_goes_on_in_a_copy_of_the_database(database, tmp_path):
    copied = tmp_path / "prefect.db"

    @flow(name="inner", flow_run_name="inner")
    def inner():
        copy_database(database, copied)

    @flow(name="outer", flow_run_name="outer")
    def outer():
        with served_runs() as served:
            cancelled = served.client.create_flow_run(inner, name="cancelled", state=Running())
            served.client.set_flow_run_state(cancelled.id, Cancelling(), force=True)
            served.client.create_flow_run(inner, name="paused", state=Suspended())
            served.client.create_task_run(task(inner.fn), cancelled.id, "key", name="a task", state=Running())
        inner()

    outer()
    make_idle(copied, "it went on")
    with sqlite3.connect(copied) as file:
        query = "SELECT run.name, state.name, type, message FROM {0} run JOIN {0}_state state ON state.id = state_id"
        states = {state for table in ("flow_run", "task_run") for state in file.execute(query.format(table))}
    crashed = {(name, "Crashed", "CRASHED", "it went on") for name in ("outer", "inner", "a task")}
    assert crashed | {("cancelled", "Cancelled", "CANCELLED", "it went on")} <= states
    assert ("paused", "Suspended", "PAUSED", None) in states
    assert not {kind for _, _, kind, _ in states} & {"RUNNING", "PENDING", "CANCELLING"}


def test_the_numbers_for_prometheus_are_those_of_the_server(database, tmp_path):
    with served_runs() as served:
        client = served.client
        every_night = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 2 * * *"), active=True)
        flow_id = client.create_flow_from_name("nightly")
        nightly = client.create_deployment(flow_id, NIGHTLY, schedules=[every_night])
        run = client.create_flow_run_from_deployment(nightly, state=Completed())
        ended = client.read_flow_run(run.id).end_time
        runs = []
        while page := client.read_flow_runs(limit=200, offset=len(runs)):
            runs += page
    outermost = [each for each in runs if each.parent_task_run_id is None]
    known = Counter("late" if each.state_name == "Late" else each.state_type.value.lower() for each in outermost)
    numbers = {family.name: family.samples for family in RootNumbers(tmp_path).collect()}
    counts = {sample.labels["state"]: sample.value for sample in numbers["athanor_runs"]}
    assert {state: count for state, count in counts.items() if count} == known and known["completed"] >= 1
    (success,) = numbers["athanor_nightly_last_success_timestamp_seconds"]
    assert success.value == pytest.approx(ended.timestamp(), abs=1e-3)
    assert [sample.value for sample in numbers["athanor_nightly_is_on"]] == [1]


def test_a_database_without_tables_has_no_run(tmp_path):
    (tmp_path / "prefect.db").touch()
    with stored_runs(tmp_path / "prefect.db") as stored:
        assert stored.newest(3) == []
