"""MLflow as a listener: what a run holds, that nothing is logged twice, and that an outage stops nothing."""

import base64
import multiprocessing
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.manifest import Manifest, Parent, ShardEntry
from dataset_builders.contracts.sample_record import to_fields
from dataset_builders.contracts.shard_io import ShardWriter
from stages.artifact import Artifact
from stages.metrics_sink import MetricsSink
from stages.tracking import (
    Tracker,
    compare_url,
    connect,
    flat_scores,
    open_run,
    run_name,
    server_command,
    server_url,
    wrong_first,
)
from tests.helpers.fake_trainer import metrics_row
from tests.helpers.samples import make_sample
from trainer.contract import METRICS_JSONL, MetricsRow

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg=="
)
SCORES = {"digits": {"exact_match": 0.5}, "overall": {"exact_match": 0.75, "stop_rate": 1.0}}
CONFIG = {"train": {"optim": {"lr": 1e-3}, "num_steps": 3}, "convert": {"subsets": ["a", "b"]}, "long": "x" * 9000}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def _artifact(root: Path, stage: str, fingerprint: str, **fields) -> Artifact:
    directory = root / "artifacts" / stage / fingerprint
    directory.mkdir(parents=True, exist_ok=True)
    values = {"config": {"seed": 0}, "parents": {}} | fields
    Manifest(stage=stage, version=1, fingerprint=fingerprint, **values).write(directory)
    (directory / "report.html").write_text("<p>report</p>")
    (directory / "report.json").write_text("{}")
    return Artifact.load(directory)


def _trained(root: Path, fingerprint: str, num_steps: int) -> Artifact:
    artifact = _artifact(root, "train", fingerprint, stats={"steps": num_steps})
    lines = [metrics_row(step).model_dump_json() + "\n" for step in range(1, num_steps + 1)]
    (artifact.dir / METRICS_JSONL).write_text("".join(lines))
    return artifact


def _evaluated(root: Path, fingerprint: str) -> Artifact:
    parents = {"samples": Parent(name="convert", fingerprint="c" * 16)}
    artifact = _artifact(root, "evaluate", fingerprint, parents=parents, stats={"scores": SCORES})
    answers = {
        "key": [f"a/{i:08d}" for i in range(100)],
        "subset": ["a"] * 100,
        "question": ["Which digit?"] * 100,
        "reference": ["1"] * 100,
        "answer": ["1"] * 98 + ["2", ""],
        "correct": [True] * 98 + [False, False],
        "image": [PNG if i % 2 else None for i in range(100)],
    }
    pq.write_table(pa.table(answers), artifact.dir / "predictions.parquet")
    return artifact


def _exported(root: Path, fingerprint: str) -> Artifact:
    stats = {"dtype": "float32", "parameters": {"language": 5}, "steps": 3, "files": {"a": "b"}}
    artifact = _artifact(root, "export", fingerprint, stats=stats)
    (artifact.dir / "hf").mkdir(exist_ok=True)
    return artifact


def _open(root: Path, identity: str, name: str = "embedded") -> Tracker:
    run_id = open_run(root, "athanor-test", name, identity, CONFIG, {"athanor.recipe": "embedded"})
    assert run_id is not None
    return Tracker(root, run_id)


def _shard(directory: Path) -> ShardEntry:
    with ShardWriter(directory, "train/shard-00000.tar") as writer:
        for number in range(7):
            sample = make_sample(number)
            writer.write(sample.key, to_fields(sample))
        return writer.commit("train")


def _tables(tracker: Tracker) -> list[str]:
    return [item.path for item in tracker.client.list_artifacts(tracker.run_id, "table_images/predictions")]


def test_a_run_holds_everything_and_nothing_twice(root):
    tracker = _open(root, "whole")
    samples = _artifact(root, "convert", "c" * 16, shards=[_shard(root / "artifacts" / "convert" / ("c" * 16))])
    trained, exported, evaluated = _trained(root, "d" * 16, 3), _exported(root, "e" * 16), _evaluated(root, "f" * 16)
    for _ in range(2):  # the second round is a rerun of the same pipeline
        tracker.log_stage(samples, False)
        tracker.replay_metrics(trained)
        tracker.log_stage(trained, True)
        model_id = tracker.log_model(exported, SCORES, "athanor-test")
        tracker.log_evaluation(evaluated, model_id)
        assert model_id
    tracker.finish("FINISHED")
    assert tracker.problems == []
    client, run = tracker.client, tracker.client.get_run(tracker.run_id)
    assert run.data.params["train.optim.lr"] == "0.001" and len(run.data.params["long"]) == 6000
    assert run.data.tags["fingerprint.convert"] == "c" * 16 and run.data.tags["reused.train"] == "true"
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("convert", "c" * 16)
    assert {tag.key: tag.value for tag in dataset.tags}["num_samples"] == "7"
    names = {item.path for item in client.list_artifacts(run.info.run_id, "stages/convert")}
    pages = ("manifest.json", "preview.html", "report.html", "report.json")
    assert names == {f"stages/convert/{name}" for name in pages}
    page = Path(client.download_artifacts(run.info.run_id, "stages/convert/preview.html")).read_text()
    assert all(make_sample(number).key in page for number in range(7)), "the page of `athanor preview`"
    assert run.data.metrics["exact_match"] == 0.75 and run.data.metrics["exact_match/digits"] == 0.5
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3]
    assert len(client.get_metric_history(run.info.run_id, "exact_match")) == 1
    assert len(_tables(tracker)) == 2 * 64  # a picture and its thumbnail, for 64 rows
    assert run.info.status == "FINISHED"


def test_the_model_is_registered_once_with_its_scores(root):
    tracker = _open(root, "model")
    exported = _exported(root, "1" * 16)
    ids = {tracker.log_model(exported, SCORES, "athanor-once") for _ in range(2)}
    assert len(ids) == 1
    (version,) = tracker.client.search_model_versions("name='athanor-once'")
    assert version.tags["exact_match"] == "0.75" and version.source.endswith("/hf")
    assert version.run_id == tracker.run_id
    model = tracker.client.get_logged_model(ids.pop())
    assert model.status == "READY" and model.params["dtype"] == "float32"


def test_every_field_of_a_metrics_row_becomes_a_metric(root):
    tracker = _open(root, "fields")
    sink = tracker.sink()
    optional = {name: 0.5 for name, field in MetricsRow.model_fields.items() if not field.is_required()}
    sink([metrics_row(1, **optional)])
    assert sink.close() == 0
    metrics = tracker.client.get_run(tracker.run_id).data.metrics
    assert metrics.keys() == MetricsRow.model_fields.keys() - {"step"}


def test_many_rows_go_in_batches_that_mlflow_takes(root):
    tracker = _open(root, "many")
    sink = tracker.sink()
    sink([metrics_row(step) for step in range(1, 151)])
    assert sink.close(60) == 0
    history = tracker.client.get_metric_history(tracker.run_id, "loss")
    assert sorted(metric.step for metric in history) == list(range(1, 151))


def test_what_live_tracking_missed_is_replayed_exactly_once(root):
    tracker = _open(root, "replay")
    for rows in ([metrics_row(1)], [metrics_row(1), metrics_row(3)]):  # the second try sees the first one's file
        sink = tracker.sink()
        sink(rows)
        assert sink.close() == 0
    trained = _trained(root, "2" * 16, 5)
    assert tracker.replay_metrics(trained) == 3
    assert tracker.replay_metrics(trained) == 0
    history = tracker.client.get_metric_history(tracker.run_id, "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5]


def test_the_same_pipeline_goes_on_in_its_run_and_another_gets_its_own(root):
    first = _open(root, "identity-a")
    first.finish("FAILED")
    again, other = _open(root, "identity-a"), _open(root, "identity-b", "embedded lr=0.01")
    assert again.run_id == first.run_id != other.run_id
    assert again.client.get_run(again.run_id).info.status == "RUNNING"
    assert other.client.get_run(other.run_id).info.run_name == "embedded lr=0.01"
    assert again.run_id in again.url() and other.run_id in (again.compare_with_last() or "")


def test_a_dead_server_stops_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    started = time.monotonic()
    assert open_run(tmp_path, "athanor-test", "x", "y", CONFIG, {}) is None
    assert "the pipeline goes on without" in caplog.text
    tracker = Tracker(tmp_path, None)
    tracker.log_stage(_artifact(tmp_path, "convert", "c" * 16), False)
    tracker.replay_metrics(_trained(tmp_path, "d" * 16, 2))
    assert tracker.log_model(_exported(tmp_path, "e" * 16), SCORES, "m") is None
    tracker.log_evaluation(_evaluated(tmp_path, "f" * 16))
    tracker.finish("FINISHED")
    assert tracker.problems == [] and time.monotonic() - started < 20


def test_a_failing_call_is_kept_as_a_problem(root, caplog):
    tracker = _open(root, "problem")
    tracker.client = SimpleNamespace(get_run=lambda run_id: 1 / 0)
    tracker.log_stage(_artifact(root, "convert", "9" * 16), False)
    assert len(tracker.problems) == 1 and "division by zero" in tracker.problems[0]
    assert "the pipeline goes on" in caplog.text


def test_sink_neither_waits_nor_raises_and_sends_after_an_outage():
    sent, is_down = [], threading.Event()
    is_down.set()

    def send(rows):
        if is_down.is_set():
            raise ConnectionError("down")
        sent.extend(row.step for row, _ in rows)

    sink = MetricsSink(send, lambda: 0, retry_seconds=0.05)
    started = time.monotonic()
    sink([metrics_row(1)])
    sink([metrics_row(2)])
    assert time.monotonic() - started < 0.5
    time.sleep(0.2)
    assert sent == []
    is_down.clear()
    sink([metrics_row(3)])
    assert sink.close(5) == 0
    assert sent == [1, 2, 3]


def test_sink_closes_in_time_when_the_server_hangs():
    hang = threading.Event()
    sink = MetricsSink(lambda rows: hang.wait(30), lambda: 0)
    sink([metrics_row(1)])
    started = time.monotonic()
    assert sink.close(0.2) == 1
    assert time.monotonic() - started < 2
    hang.set()


def _connect_and_log(root: str) -> str:
    client = connect(Path(root))
    run = client.create_run("0")
    client.log_metric(run.info.run_id, "loss", 1.0)
    return run.info.run_id


def test_processes_that_meet_a_fresh_store_do_not_ruin_it(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        runs = pool.map(_connect_and_log, [str(tmp_path)] * 2)
    assert len({*runs}) == 2
    assert len(connect(tmp_path).search_runs(["0"])) == 2


@pytest.mark.parametrize(
    ("differs", "name"),
    [
        ({}, "embedded"),
        ({"train.optim.lr": 1e-05}, "embedded lr=1e-05"),
        (
            {"convert.seed": 1, "train.seed": 2, "train.num_steps": 3},
            "embedded convert.seed=1 train.seed=2 num_steps=3",
        ),
    ],
)
def test_run_names_say_what_differs(differs, name):
    assert run_name("embedded", differs) == name


def test_scores_are_named_for_charts():
    assert flat_scores(SCORES) == {"exact_match/digits": 0.5, "exact_match": 0.75, "stop_rate": 1.0}


def test_wrong_answers_come_first(root):
    rows = wrong_first(_evaluated(root, "8" * 16).dir, 4)
    assert [row["answer"] for row in rows] == ["2", "", "1", "1"]


def test_addresses(tmp_path, monkeypatch):
    assert server_command(tmp_path).startswith(f"mlflow server --backend-store-uri sqlite:///{tmp_path}/mlflow.db")
    url = compare_url(["a", "b"], "7", server_url(tmp_path))
    assert url == "http://127.0.0.1:5000/#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D&experiments=%5B%227%22%5D"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:8080/")
    assert server_url(tmp_path) == "http://tracking:8080"
