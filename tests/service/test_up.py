"""`athanor up` as a user has it: everything answers, a run finds it, dead programs are restarted, nothing is left
behind."""

import contextlib
import re
import signal
import sqlite3
from collections.abc import Iterator

import psutil
import pytest

from flows.tracking.servers import read_record
from stages.shared.launchers.config import ClusterConfig
from tests.helpers.service import RunningService, run_athanor, running_service, wait_for
from tests.helpers.small_run import SMALL

pytestmark = pytest.mark.full
AGAIN_SECONDS = 240


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """Run a new service, whose only runs are those of this module."""
    with running_service(tmp_path_factory.mktemp("service") / "root") as running:
        yield running


def flow_runs(service: RunningService) -> list[dict]:
    """Return the runs that a user has started, without subflow runs."""
    found = service.prefect("/flow_runs/filter", {"sort": "START_TIME_DESC"})
    return [run for run in found if run["parent_task_run_id"] is None]


def wait_for_another(service: RunningService, part: str, old: psutil.Process) -> None:
    """Wait until a program runs again, in another process, and `athanor up` says that it is ready."""

    def is_there() -> bool:
        said = [line.split()[1] for line in service.printed() if line.startswith(f"{part} ")]
        found = service.program(part)
        return said[-1] == "ready" and found is not None and found.pid != old.pid

    wait_for(is_there, AGAIN_SECONDS, f"new {part}", service.tell)


def test_it_says_what_it_starts_and_where(service):
    # `service` waits for the record, which is written before the line is printed.
    wait_for(lambda: service.printed()[-1].startswith("ready after"), 30, "last line", service.tell)
    lines = service.printed()
    for part, address in (("prefect", service.record.prefect_ui), ("mlflow", service.record.mlflow)):
        states = [line.split()[1] for line in lines if line.startswith(f"{part} ")]
        assert states == ["starting", "ready"]
        assert any(line.startswith(part) and line.endswith(address) for line in lines)
    assert re.search(r"^worker +ready +up to 2 flow runs", "\n".join(lines), re.M)
    assert re.fullmatch(r"ready after \d+\.\d s; Ctrl-C stops everything", lines[-1])
    assert service.record.pid == service.process.pid


def test_everything_listens_on_this_machine_alone(service):
    listening = [
        connection.laddr
        for process in [service.process, *service.processes()]
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    ports = {int(url.rpartition(":")[2]) for url in (service.record.prefect_ui, service.record.mlflow)}
    assert {address.port for address in listening} >= ports  # the worker has another directory for its flow runs
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_the_ui_is_told_the_right_address_of_the_server(service):
    assert service.ask(f"{service.record.prefect_ui}/ui-settings")["api_url"] == service.record.prefect_api


def test_deployments_pool_worker_and_limits_are_there(service):
    names = {found["name"] for found in service.prefect("/deployments/filter", {})}
    assert names == {"vlm-sft", "vlm-sft-nightly", "prepare-data", "evaluate", "sweep"}
    assert service.prefect("/work_pools/athanor")["type"] == "process"
    (worker,) = service.prefect("/work_pools/athanor/workers/filter", {})
    assert worker["status"] == "ONLINE"
    limits = {limit["name"]: limit["limit"] for limit in service.prefect("/v2/concurrency_limits/filter", {})}
    assert limits[ClusterConfig().limit] == 1


def test_a_run_finds_it_and_shows_up_in_both(service):
    done = service.athanor("run")
    assert done.returncode == 0, done.stderr + service.tell()
    (run,) = flow_runs(service)
    assert run["state_name"] == "Completed"
    (tracked,) = service.mlflow_runs()
    tags = {tag["key"]: tag["value"] for tag in tracked["data"]["tags"]}
    assert tags["prefect.flow_run_id"] == run["id"] and tracked["info"]["status"] == "FINISHED"
    assert service.record.mlflow in done.stdout
    # Its files are in the root, where they can be read without the service.
    place = tracked["info"]["artifact_uri"].removeprefix("mlflow-artifacts:/")
    assert list((service.root / "mlflow-artifacts" / place).rglob("manifest.json"))


def test_a_second_one_is_refused_with_the_addresses_of_the_first(service):
    done = run_athanor("up", service.root)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    for word in (str(service.process.pid), service.record.prefect_ui, service.record.mlflow):
        assert word in line
    assert read_record(service.root) == service.record


def test_servers_that_hang_are_started_again(service):
    hung = {part: service.program(part) for part in ("mlflow", "prefect")}
    for process in hung.values():
        process.send_signal(signal.SIGSTOP)
    for part, process in hung.items():
        wait_for_another(service, part, process)
        assert any(line.startswith(f"{part} ") and "hangs" in line for line in service.printed())
    assert read_record(service.root) == service.record  # the same ports
    assert all(service.program(name) for name in ("prefect", "mlflow", "worker"))


def test_killed_itself_the_next_one_cleans_up_on_the_same_ports_and_ctrl_c_leaves_nothing(service):
    before = {process.pid for process in service.processes()}
    service.kill()
    assert run_athanor("run", service.root).returncode == 0  # the record of a dead service is ignored
    after = RunningService(service.root)
    try:
        assert not before & {process.pid for process in after.processes()}
        assert (after.record.prefect_ui, after.record.mlflow) == (service.record.prefect_ui, service.record.mlflow)
        assert len(flow_runs(after)) == 2  # one run with a service, and one without
        assert len(after.mlflow_runs()) == 1
        run_id = start_training(after)
        started = {process.pid for process in after.processes()}
    finally:
        assert after.stop(signal.SIGINT) == 0
    assert not after.processes() and not any(psutil.pid_exists(pid) for pid in started)
    assert read_record(service.root) is None and not (service.root / "service" / "service.json").exists()
    assert [line.split()[1] for line in after.printed() if line.startswith("worker ")][-1] == "stopped"
    # The training has saved, and the flow run does not stay "Running".
    assert list(service.root.glob("scratch/train-*/checkpoints/step-*")), after.tell()
    with sqlite3.connect(service.root / "prefect" / "prefect.db") as database:
        (state,) = database.execute("SELECT state_type FROM flow_run WHERE id = ?", (run_id,)).fetchone()
    assert state == "CRASHED"


def start_training(service: RunningService) -> str:
    """Start a flow run as the UI does, and wait until it trains. Return its id."""
    run_id = service.start_run("vlm-sft", {**SMALL, "train.num_steps": 5000})
    trains = "scratch/train-*/metrics.jsonl"
    wait_for(lambda: list(service.root.glob(trains)), AGAIN_SECONDS, "training", service.tell)
    return run_id


def test_a_program_that_cannot_start_is_told_with_the_end_of_its_log(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:  # whole, but of an MLflow to come
        database.executescript(
            "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('x')"
        )
    failed = RunningService(root, ready=False)
    try:
        assert failed.process.wait(AGAIN_SECONDS) == 1, failed.tell()
    finally:
        failed.stop()
    text = failed.output.read_text()
    assert "athanor: mlflow died (status 1)" in text
    assert "Can't locate revision identified by 'x'" in text.split("athanor: mlflow")[1]
    assert not failed.processes()
