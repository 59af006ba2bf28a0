"""Tracking in MLflow: the content of a run, that nothing is logged twice, and that an outage stops nothing."""

import json
import time
from pathlib import Path
from urllib.parse import unquote

import pytest

import flows.tracking.record
import flows.tracking.tracker
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import to_fields
from dataset_builders.contracts.shard_io import ShardWriter
from flows.libraries.mlflow_private import RUN_COLOURS, next_colour
from flows.tracking.parts import side_by_side, wrong_first
from flows.tracking.record import load_record, records_dir
from flows.tracking.run_writer import metric_name
from flows.tracking.servers import reserve_ports
from flows.tracking.store import compare_url, connect, server_url
from flows.tracking.tracker import Opening, Tracker, open_run, publish_waiting, sender_of
from stages.shared.artifacts.artifact import Artifact
from tests.helpers.fake_trainer import metrics_row
from tests.helpers.patience import wait_for
from tests.helpers.samples import make_sample
from tests.helpers.tracked_run import (
    Nobody,
    make_artifact,
    make_evaluated,
    make_exported,
    make_trained,
    open_tracker,
    write_live,
)
from trainer.contract.names import METRICS_JSONL
from trainer.contract.result import MetricsRow


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def _delivered(tracker: Tracker) -> str:
    """Return the id of the MLflow run, once the run holds everything that was logged so far."""
    assert sender_of(tracker.root).wait(tracker.key)
    learnt = load_record(tracker.root, tracker.key).learnt
    assert learnt.refused == {}
    return learnt.run_id


def _shard(directory: Path) -> ShardEntry:
    with ShardWriter(directory, "train/shard-00000.tar") as writer:
        for number in range(7):
            sample = make_sample(number)
            writer.write(sample.key, to_fields(sample))
        return writer.commit("train")


def test_a_run_holds_everything_and_nothing_twice(root):
    samples = make_artifact(root, "convert", "c" * 16, shards=[_shard(root / "artifacts" / "convert" / ("c" * 16))])
    trained, exported = make_trained(root, "d" * 16, 3), make_exported(root, "e" * 16)
    evaluated = make_evaluated(root, "f" * 16, warnings=["a: read otherwise, it fits better"])
    times = []
    for _ in range(2):  # the second round repeats the same pipeline
        tracker = open_tracker(root, "whole")
        tracker.log_stage(samples, dataset="samples")
        tracker.log_stage(trained)
        tracker.log_stage(evaluated)
        tracker.register(exported, evaluated, exported.dir / "hf", "athanor-test")
        tracker.finish("FINISHED")
        run_id = _delivered(tracker)
        run = connect(root).get_run(run_id)
        times.append((run.info.start_time, run.info.end_time))
    client = connect(root)
    assert times[0] == times[1] and run.info.status == "FINISHED", "a finished run keeps its times"
    assert run.data.params["train.optim.lr"] == "0.001" and len(run.data.params["long"]) == 6000
    assert run.data.tags["mlflow.athanor.fingerprint.convert"] == "c" * 16
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("digits", "c" * 16)
    assert json.loads(dataset.dataset.profile) == {"train_samples": 7, "subsets": 0, "left_out": 0}
    columns = json.loads(dataset.dataset.schema)["mlflow_colspec"]
    assert [column["name"] for column in columns] == ["key", "messages", "images"]
    names = {item.path for item in client.list_artifacts(run_id, "stages/convert")}
    pages = ("manifest.json", "references.json", "report.html", "report.json")
    assert names == {f"stages/convert/{name}" for name in pages}
    assert run.data.metrics["exact_match"] == 0.75 and run.data.metrics["exact_match/digits"] == 0.5
    model = client.get_logged_model(run.data.tags["mlflow.athanor.model_id"])
    assert model.status == "READY" and model.params["dtype"] == "float32"
    assert {(m.key, m.value) for m in model.metrics} >= {("exact_match", 0.75), ("exact_match/digits", 0.5)}
    assert {(m.dataset_name, m.dataset_digest) for m in model.metrics} == {("digits", "c" * 16)}
    (version,) = client.search_model_versions("name='athanor-test'")
    of_run = {"recipe": "embedded", "data": "digits", "base_model": "random weights"}
    assert version.tags == of_run | {"fingerprint": "e" * 16, "score": "exact_match 0.7500"}
    assert version.run_id == run_id and f"/models/{model.model_id})" in version.description
    assert 'load_model("models:/athanor-test@champion")' in client.get_registered_model("athanor-test").description
    headline = ("final_loss", "timing/train_seconds", "train_tokens_per_second", "timing/flow_seconds", "exact_match")
    assert all(len(client.get_metric_history(run_id, name)) == 1 for name in headline)
    assert run.data.metrics["final_loss"] == pytest.approx(1 / 3) and run.data.metrics["timing/train_seconds"] == 0.75
    assert [m.step for m in client.get_metric_history(run_id, "loss")] == [1, 2, 3]
    pictures = client.list_artifacts(run_id, "table_images/predictions")
    assert len(pictures) == 2 * 64  # an image and its thumbnail for each of 64 rows
    table = json.loads(Path(client.download_artifacts(run_id, "predictions.json")).read_text())
    first = ["image", "question", "reference", "answer", "score"]
    assert table["columns"] == [*first, "key", "turn", "subset", "references", "pictures"] and len(table["data"]) == 64
    logged = [table["path"] for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])]
    assert logged == ["answers.json", "predictions.json"], "MLflow's view of several runs opens with the first"
    note = run.data.tags["mlflow.note.content"]
    first, reports, decision = note.split("\n\n")[:3]
    assert first == "**exact_match 0.7500, loss 0.3333, 400 tokens/s over the training**"
    assert decision.startswith("Registered model: exact_match 0.7500 (0.9") and reports.startswith(
        "Reports: [evaluate](#"
    )
    assert run.data.tags["athanor.warning"] == "a: read otherwise, it fits better"
    assert note.split("\n\n")[3] == "**Warning**: a: read otherwise, it fits better"
    assert "What it is." in note and "| overall&emsp; | 0.7500 | 1.0000 |" in note
    assert f"runs/{run_id}/artifacts/stages/convert/report.html" in note
    assert Path(client.download_artifacts(run_id, "recipe.yaml")).read_text() == "name: embedded\n"


def test_a_model_that_a_gate_keeps_out_is_logged_and_not_registered_until_the_gate_lets_it_in(root):
    exported, evaluated = make_exported(root, "2" * 16), make_evaluated(root, "3" * 16)
    asked = (exported, evaluated, exported.dir / "hf", "athanor-gated")
    tracker = open_tracker(root, "gated")
    for _ in range(2):
        tracker.register(*asked, ["stop_rate 0.2500 is below 0.9"])
        _delivered(tracker)
    run_id, client = _delivered(tracker), connect(root)
    run = client.get_run(run_id)
    assert not client.search_model_versions("name='athanor-gated'")
    assert run.data.tags["athanor.champion"] == "not registered: stop_rate 0.2500 is below 0.9"
    assert "not registered: stop_rate 0.2500 is below 0.9" in run.data.tags["mlflow.note.content"]
    assert client.get_logged_model(run.data.tags["mlflow.athanor.model_id"]).status == "READY"
    tracker.register(*asked)
    _delivered(tracker)
    (version,) = client.search_model_versions("name='athanor-gated'")
    assert client.get_run(run_id).data.tags["athanor.champion"].endswith("champion") and version.run_id == run_id


def test_a_trace_of_steps_goes_with_its_training(root):
    traced = make_trained(root, "9" * 16, 3)
    (traced.dir / "profile").mkdir()
    (traced.dir / "profile" / "rank-0.json.gz").write_bytes(b"trace")
    (traced.dir / "profile" / "rank-0.md").write_text("# Steps 2 to 3")
    tracker = open_tracker(root, "traced")
    tracker.log_stage(traced)
    run_id, client = _delivered(tracker), connect(root)
    names = sorted(item.path for item in client.list_artifacts(run_id, "stages/train/profile"))
    assert names == ["stages/train/profile/rank-0.json.gz", "stages/train/profile/rank-0.md"]
    copy = Path(client.download_artifacts(run_id, names[0]))
    assert copy.read_bytes() == b"trace"


def test_every_field_of_a_metrics_row_becomes_a_metric(root):
    tracker = open_tracker(root, "fields", samples_host=True)
    optional = {name: 0.5 for name, field in MetricsRow.model_fields.items() if not field.is_required()}
    row = metrics_row(1, **optional | {"time_ms": 1700000000123, "layers_experts_idle": 0.25})
    with tracker.follow(root / "fields.jsonl", 1):
        (root / "fields.jsonl").write_text(row.model_dump_json() + "\n")
    tracker.finish("FINISHED")
    run_id = _delivered(tracker)
    metrics = connect(root).get_run(run_id).data.metrics
    of_training = {name for name in metrics if not name.startswith("usage/")} - {"timing/flow_seconds"}
    assert of_training == {metric_name(name) for name in MetricsRow.model_fields.keys() - {"step", "time_ms"}} | {
        "layers_experts_idle"  # reported by layers
    }
    assert "timing/step_seconds" in metrics and "tokens_per_second" in metrics
    (point,) = connect(root).get_metric_history(run_id, "loss")
    assert point.timestamp == 1700000000123, "the moment at which the trainer wrote the line"
    assert metrics["usage/cpu_utilization_percentage"] >= 0


def test_a_row_is_sent_while_the_training_goes_on(root):
    tracker = open_tracker(root, "watched")
    write_live(tracker, [metrics_row(1)])
    run_id, client = _delivered(tracker), connect(root)
    with (root / "scratch" / METRICS_JSONL).open("a") as file:
        file.write(metrics_row(2).model_dump_json() + "\n")
    wait_for(lambda: [point.step for point in client.get_metric_history(run_id, "loss")] == [1, 2], 120, "second row")


def test_many_rows_go_in_batches_that_mlflow_takes(root):
    tracker = open_tracker(root, "many")
    write_live(tracker, [metrics_row(step) for step in range(1, 151)])
    history = connect(root).get_metric_history(_delivered(tracker), "loss")
    assert [metric.step for metric in history] == list(range(1, 151))


def test_what_live_tracking_missed_is_added_exactly_once(root):
    tracker = open_tracker(root, "replay")
    for rows in ([metrics_row(1)], [metrics_row(1), metrics_row(3)]):  # the second try writes another file
        write_live(tracker, rows, "w")
        _delivered(tracker)
    trained = make_trained(root, "2" * 16, 5)
    for _ in range(2):
        tracker.log_stage(trained)
        _delivered(tracker)
    history = connect(root).get_metric_history(_delivered(tracker), "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5]


def test_the_same_pipeline_goes_on_in_its_run_and_another_gets_its_own(root):
    first = open_tracker(root, "identity-a")
    first.finish("FAILED")
    run_id = _delivered(first)
    assert connect(root).get_run(run_id).info.status == "FAILED"
    again, other = open_tracker(root, "identity-a"), open_tracker(root, "identity-b", "embedded lr=0.01")
    other.log_stage(make_artifact(root, "convert", "6" * 16))
    assert _delivered(again) == run_id != _delivered(other)
    assert connect(root).get_run(run_id).info.status == "RUNNING"
    assert connect(root).get_run(_delivered(other)).info.run_name == "embedded lr=0.01"
    again.finish("FINISHED")
    assert run_id in again.url()


def test_runs_that_one_chart_may_have_differ_in_colour(root):
    newest = []
    for number in range(12):
        tracker = open_tracker(root, f"colour-{number}")
        tracker.log_stage(make_artifact(root, "convert", "6" * 16))
        newest.append(connect(root).get_run(_delivered(tracker)).data.tags["mlflow.runColor"])
    assert all(len({*newest[first : first + 10]}) == 10 for first in range(3)), newest
    assert next_colour([None, *RUN_COLOURS]) == RUN_COLOURS[-1], "the one that was not used for longest"


def test_a_run_that_is_refused_before_its_first_stage_leaves_none(root):
    refused = open_tracker(root, "refused")
    assert _delivered(refused) is None, "it has not begun"
    refused.finish("REFUSED")
    assert _delivered(refused) is None and publish_waiting(root) == []
    later = open_tracker(root, "refused")
    later.log_stage(make_artifact(root, "convert", "8" * 16))
    later.finish("REFUSED")
    assert connect(root).get_run(_delivered(later)).info.status == "FAILED"


def test_the_next_run_sends_what_an_earlier_one_could_not_send(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())
        earlier = open_tracker(tmp_path, "earlier")
        earlier.finish("FAILED")
    assert not earlier.is_sent()
    open_tracker(tmp_path, "later").finish("REFUSED")
    assert earlier.is_sent()


def test_a_run_is_compared_with_the_newest_finished_one_on_the_same_data(root):
    data, other_data = (make_artifact(root, "convert", letter * 16) for letter in "57")
    runs = {}
    for name, samples, status in (
        *(("good", data, "FINISHED"), ("failed", data, "FAILED"), ("other data", other_data, "FINISHED")),
        *(("running", data, None), ("last", data, "FINISHED")),
    ):
        tracker = open_tracker(root, name)
        tracker.log_stage(samples)
        if status is not None:
            tracker.finish(status)
        runs[name] = _delivered(tracker)
    url = unquote(tracker.compare_with_last())
    assert [name for name, run_id in runs.items() if run_id in url] == ["good", "last"]
    note = connect(root).get_experiment_by_name("athanor-test").tags["mlflow.note.content"]
    assert "2 newest](" in note and runs["failed"] not in note and runs["other data"] not in note


def test_a_run_that_is_made_again_says_who_is_champion_now(root):
    exported = make_exported(root, "a1" * 8)

    def verdict(identity: str, num_wrong: int) -> str:
        evaluated = make_evaluated(root, f"{num_wrong:016x}", num_wrong=num_wrong)
        evaluated.manifest.stats["scores"] = {"overall": {"exact_match": 1 - num_wrong / 100}}
        tracker = open_tracker(root, identity)
        tracker.register(exported, evaluated, exported.dir / "hf", "athanor-again")
        tracker.finish("FINISHED")
        _delivered(tracker)
        return tracker.learnt().verdict

    first = verdict("first", 20)
    assert first.startswith("exact_match 0.8000 (0.") and first.endswith("), no champion before: champion")
    assert verdict("first", 20) == "version 1 of an earlier run, the champion still"
    assert verdict("second", 2).endswith("of version 1: champion")
    assert verdict("first", 20) == "version 1 of an earlier run, the champion is version 2 now"
    connect(root).delete_model_version("athanor-again", "1")
    assert verdict("first", 20) == "version 1 of an earlier run, which was deleted since"


def test_without_a_key_nothing_is_said(tmp_path):
    tracker = Tracker(tmp_path, None)
    tracker.log_stage(make_artifact(tmp_path, "convert", "c" * 16))
    exported = make_exported(tmp_path, "e" * 16)
    tracker.register(exported, make_evaluated(tmp_path, "f" * 16), exported.dir / "hf", "m")
    with tracker.follow(tmp_path / "metrics.jsonl", 1):
        pass
    tracker.finish("FINISHED")
    assert tracker.url() is None and tracker.compare_with_last() is None
    assert not (tmp_path / "tracking").exists()


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path, caplog, monkeypatch):
    tracker = open_tracker(tmp_path, "problem")
    _delivered(tracker)
    with monkeypatch.context() as patch:
        patch.setattr(flows.tracking.record, "write_text", lambda path, text: 1 / 0)
        tracker.log_stage(make_artifact(tmp_path, "convert", "9" * 16))
    assert "log_stage of convert failed (ZeroDivisionError: division by zero); the pipeline goes on" in caplog.text
    (records_dir(tmp_path) / "problem.json").unlink()
    tracker.finish("FINISHED")
    assert "finish failed (FileNotFoundError" in caplog.text
    assert tracker.url(0) is None and tracker.compare_with_last() is None
    (tmp_path / "file").write_text("")
    opening = Opening(experiment="x", name="x", identity="x", params={}, tags={})
    assert open_run(tmp_path / "file", opening) is None and "the pipeline goes on without" in caplog.text


def test_what_mlflow_never_takes_is_noted_and_the_rest_goes_on(tmp_path, caplog):
    tracker = open_tracker(tmp_path, "gone")
    tracker.log_stage(Artifact(tmp_path / "nowhere", make_artifact(tmp_path, "convert", "c" * 16).manifest))
    tracker.log_stage(make_trained(tmp_path, "d" * 16, 2))
    tracker.finish("FINISHED")
    assert sender_of(tmp_path).wait("gone")
    learnt = load_record(tmp_path, "gone").learnt
    assert "nowhere" in learnt.refused["stage convert"] and len(learnt.refused) == 1
    assert caplog.text.count("MLflow never takes the stage convert") == 1
    run = connect(tmp_path).get_run(learnt.run_id)
    assert run.info.status == "FINISHED" and run.data.metrics["loss"] == 0.5
    assert publish_waiting(tmp_path) == []


def test_calls_return_at_once_while_mlflow_is_away(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    tracker = open_tracker(tmp_path, "away")
    slowest = 0.0
    for step in range(1, 51):
        started = time.monotonic()
        write_live(tracker, [metrics_row(step)])
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 2, "a synced record; nothing waits for an answer"
    assert tracker.url() is None
    tracker.finish("FINISHED")
    assert " failed (" not in caplog.text and load_record(tmp_path, "away").is_waiting()


def test_wrong_answers_come_first(root):
    rows = wrong_first(make_evaluated(root, "8" * 16).dir, 4)
    assert [row["answer"] for row in rows] == ["2", "", "1", "1"]


def test_answers_side_by_side_are_of_the_same_samples_whatever_the_model_answered(root):
    one, other = (side_by_side(make_evaluated(root, 16 * c, num_wrong=n).dir, 40) for c, n in (("8", 2), ("9", 50)))
    assert one["sample"] == other["sample"] and one["answer"] != other["answer"]
    assert len(one["sample"]) == 34 and one["sample"][1] == "a/00000003:0 Which digit? Reference: 1"


def test_addresses(tmp_path, monkeypatch):
    url = compare_url(["a", "b"], "7", "http://127.0.0.1:5000")
    assert url == "http://127.0.0.1:5000/#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D&experiments=%5B%227%22%5D"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:8080/")
    assert server_url(tmp_path) == "http://tracking:8080"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://host/mlflow")
    assert server_url(tmp_path) is None


def test_the_address_is_that_which_the_roots_service_has_or_will_take(tmp_path):
    with reserve_ports(tmp_path, "127.0.0.1") as taken:  # the service of another root that is just starting
        url = server_url(tmp_path / "root")
    with reserve_ports(tmp_path / "root" / "service", "127.0.0.1") as ports:  # a later `athanor up` of this root
        assert url == f"http://127.0.0.1:{ports['mlflow']}" and ports["mlflow"] != taken["mlflow"]
    (tmp_path / "root" / "service" / "ports.json").write_text('{"mlflow": 20123}')
    assert server_url(tmp_path / "root") == "http://127.0.0.1:20123"
