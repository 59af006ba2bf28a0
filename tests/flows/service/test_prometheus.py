"""The numbers for Prometheus: what is read of a root, behind the password, and the names in the example of alerts."""

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from flows.service.guard import guarded
from flows.service.prometheus import STATES, RootNumbers, with_numbers
from flows.tracking.record import LiveTraining, Opening, changed, open_record, place_in
from tests.helpers.compose_file import INFRA
from tests.helpers.fake_trainer import metrics_row
from trainer.contract.names import METRICS_JSONL

pytestmark = pytest.mark.promise(
    "Prometheus reads runs, trainings, disk and GPUs of `athanor up` at one address, behind its password."
)

FIRST, SECOND, THIRD, FOURTH = (letter * 16 for letter in "abcd")  # keys of runs


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    return tmp_path


def numbers(root: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """Return name -> values of its labels -> value, as a reader of the text format finds them."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(RootNumbers(root)).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def write_training(root: Path, key: str, steps: Sequence[int]) -> Path:
    """Write the record of a run of this process whose training has made these steps; return its metrics.jsonl."""
    path = root / "scratch" / f"train-{key}" / METRICS_JSONL
    path.parent.mkdir(parents=True)
    rows = [metrics_row(step, time_ms=1000 * step, tokens_per_second=10 * step) for step in steps]
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    open_record(root, Opening(experiment="athanor-digits", name="digits", identity=key, params={}, tags={}))
    with changed(root, key) as record:
        record.live = LiveTraining(metrics=place_in(root, path), num_steps=1000)
    return path


def write_runs(root: Path, ended: str | None = "2026-11-29 02:30:00.500000") -> None:
    """Write the columns that are read of Prefect's tables; tests/flows/prefect_server/test_runs.py has its own."""
    database = root / "prefect" / "prefect.db"
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(
            "CREATE TABLE flow_run (state_type, state_name, parent_task_run_id, deployment_id, end_time);"
            "CREATE TABLE deployment (id, name); CREATE TABLE deployment_schedule (deployment_id, active);"
            "INSERT INTO deployment VALUES ('n', 'vlm-sft-nightly'), ('o', 'vlm-sft');"
            "INSERT INTO deployment_schedule VALUES ('n', 1), ('o', 0);"
        )
        rows = [
            *(
                ("COMPLETED", "Completed", None, "n", "2026-11-28 02:30:00"),
                ("COMPLETED", "Completed", None, "n", ended),
            ),
            *(
                ("COMPLETED", "Completed", None, "o", "2026-11-30 00:00:00"),
                ("FAILED", "Refused", None, "n", "2027-01-01"),
            ),
            *(("RUNNING", "Running", None, "o", None), ("RUNNING", "Running", "a task of another", "o", None)),
            *(("SCHEDULED", "Late", None, "o", None), ("SCHEDULED", "Scheduled", None, "n", None)),
        ]
        connection.executemany("INSERT INTO flow_run VALUES (?, ?, ?, ?, ?)", rows)


def test_runs_are_counted_by_state_and_the_nightly_success_is_its_own(root):
    write_runs(root)
    found = numbers(root)
    states = {state: count for (state,), count in found["athanor_runs"].items()}
    assert {name: count for name, count in states.items() if count} == {
        **{"completed": 3, "failed": 1, "running": 1, "late": 1, "scheduled": 1}
    }
    assert tuple(states) == STATES, "a state without a run is told as 0"
    assert found["athanor_nightly_last_success_timestamp_seconds"] == {(): 1795919400.5}
    assert found["athanor_nightly_is_on"] == {(): 1.0}


def test_without_a_database_or_before_its_tables_are_made_the_rest_is_told(root):
    assert "athanor_runs" not in numbers(root)
    (root / "prefect").mkdir()
    (root / "prefect" / "prefect.db").touch()
    found = numbers(root)
    assert "athanor_runs" not in found and found["athanor_root_free_bytes"][()] > 0


def test_a_running_training_has_its_newest_row_and_no_other_is_told(root):
    with write_training(root, FIRST, [1, 2, 30]).open("a") as file:
        file.write('{"step": 31, "loss"')  # the trainer is writing it
    write_training(root, SECOND, [5])
    write_training(root, THIRD, [6])
    write_training(root, FOURTH, [7]).unlink()  # it ended, and its flow goes on
    with changed(root, SECOND) as record:
        record.end("FINISHED", 1)
    with changed(root, THIRD) as record:
        record.owner = record.owner.model_copy(update={"pid_started": 1.0})  # a process that died
    (root / "tracking" / "broken.json").write_text("{")
    found, labels = numbers(root), ("athanor-digits", FIRST)
    assert found["athanor_training_step"] == {labels: 30}
    assert found["athanor_training_loss"] == {labels: 1 / 30}
    assert found["athanor_training_tokens_per_second"] == {labels: 300}
    assert found["athanor_training_last_row_timestamp_seconds"] == {labels: 30}


def test_the_newest_row_is_found_in_the_end_of_a_long_file(root, monkeypatch):
    write_training(root, FIRST, range(1, 200))
    monkeypatch.setattr("flows.service.prometheus._TAIL_BYTES", 1000)
    assert list(numbers(root)["athanor_training_step"].values()) == [199]


def with_gpus(monkeypatch) -> None:
    def use_of(number: int) -> SimpleNamespace:
        if number == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=75)

    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUtilizationRates": use_of,
        "nvmlDeviceGetMemoryInfo": lambda number: SimpleNamespace(used=5 + number, total=80),
    }.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_gpus_are_told_where_there_are_any(root, monkeypatch):
    with_gpus(monkeypatch)
    found = numbers(root)
    assert found["athanor_gpu_utilization_ratio"] == {("0",): 0.75}
    assert found["athanor_gpu_memory_used_bytes"] == {("0",): 5, ("1",): 6}

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert not [name for name in numbers(root) if "gpu" in name]


def test_the_page_needs_the_password_and_leaves_the_others_alone(root):
    app = guarded(with_numbers(PlainTextResponse("MLflow"), root), "athanor:word", names=["localhost"])
    client = TestClient(app, base_url="http://localhost:5000")
    assert client.get("/metrics").status_code == client.get("/metrics", auth=("athanor", "other")).status_code == 401
    answer = client.get("/metrics", auth=("athanor", "word"))
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    assert "\nathanor_root_free_bytes " in answer.text
    assert client.get("/", auth=("athanor", "word")).text == "MLflow"


def test_the_example_of_alerts_names_numbers_that_there_are(root, monkeypatch):
    write_runs(root)
    write_training(root, FIRST, [1])
    with_gpus(monkeypatch)
    (group,) = yaml.safe_load((INFRA / "prometheus" / "alerts.yaml").read_text())["groups"]
    used = {name for rule in group["rules"] for name in re.findall(r"athanor_\w+", rule["expr"])}
    assert len(used) == 5 and used <= numbers(root).keys()
    states = {
        state
        for rule in group["rules"]
        for found in re.findall(r'state=~?"(.+?)"', rule["expr"])
        for state in found.split("|")
    }
    assert states == {"failed", "crashed", "late"} and states <= set(STATES)
