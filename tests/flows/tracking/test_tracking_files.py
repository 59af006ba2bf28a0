"""The files of a run in MLflow: which files are sent, that each is sent once, also over HTTP; and a model that loads
anywhere."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from mlflow import MlflowClient

import flows.tracking.publish
import flows.tracking.run_writer
import flows.tracking.tracker
from dataset_builders.contracts.manifest import ShardEntry
from flows.tracking.publish import Publication
from flows.tracking.record import MlflowState, changed, load_record
from flows.tracking.run_writer import RunWriter, chosen_files, sizes_of
from flows.tracking.store import connect, may_pass
from flows.tracking.tracker import KILLED_SECONDS, WAIT_SECONDS, Sender, Tracker
from stages.release.flavor import FLAVOR_FILES, installed_versions, write_flavor
from stages.shared.artifacts.artifact import Artifact
from tests.helpers.mlflow_server import MlflowServer
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tracked_run import (
    MODEL,
    Nobody,
    ServerClock,
    make_artifact,
    make_evaluated,
    make_exported,
    make_trained,
    open_tracker,
    timed_row,
    write_live,
)

pytestmark = pytest.mark.promise(
    "A root that is copied or moved continues there, and a registered model loads over HTTP on another machine."
)

# The code of a user on another machine, who has only the server's address.
ELSEWHERE = f"""
import mlflow, sys
from transformers import AutoModelForImageTextToText, AutoTokenizer
place = mlflow.artifacts.download_artifacts("models:/{MODEL}@champion/hf")
model = AutoModelForImageTextToText.from_pretrained(place, local_files_only=True)
AutoTokenizer.from_pretrained(place, local_files_only=True)
print(sum(p.numel() for p in model.parameters()), file=sys.stderr)
(answer,) = mlflow.pyfunc.load_model("models:/{MODEL}@champion").predict([{{"question": "Which digit?"}}])
assert isinstance(answer, str)
print(place)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"), serves_files=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def nobody_sends(monkeypatch):
    monkeypatch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())


def make_stage(root: Path) -> Artifact:
    """Make the artifact of a stage with files of every kind."""
    shard = ShardEntry(name="train/shard-00000.tar", split="train", num_samples=1, size_bytes=5, sha256="a" * 64)
    made = make_artifact(root, "convert", "c" * 16, shards=[shard])
    texts = {
        "train/shard-00000.tar": "shard",
        "quarantine.jsonl": "",
        "logs/one.log": "log",
        "index/0.parquet": "index",
    }
    for name, text in texts.items():
        (made.dir / name).parent.mkdir(exist_ok=True)
        (made.dir / name).write_text(text)
    return made


def tell(root: Path, key: str, level: str = "small") -> Tracker:
    """Log a run with a model that transformers can load."""
    tracker = open_tracker(root, key)
    with changed(root, key) as record:
        record.opening.artifacts = level
    tracker.log_stage(make_stage(root), dataset="samples")
    tracker.log_stage(make_trained(root, "d" * 16, 3))
    exported = make_exported(root, "e" * 16)
    shutil.copytree(tiny_hf_dir("first"), exported.dir / "hf", dirs_exist_ok=True)
    write_flavor(exported.dir, installed_versions(), "Which digit?", [], 8)
    tracker.register(exported, make_evaluated(root, "f" * 16, 12), exported.dir / "hf", MODEL)
    tracker.finish("FINISHED")
    return tracker


def published(root: Path, key: str, level: str = "small") -> MlflowState:
    """Log a run, send it, and return what MLflow answered."""
    tell(root, key, level)
    Publication(root, key).run()
    return load_record(root, key).learnt


def files_of(client: MlflowClient, run_id: str, folder: str) -> set[str]:
    """Return the names below a folder of a run's artifacts."""
    found = set()
    for item in client.list_artifacts(run_id, folder):
        found |= files_of(client, run_id, item.path) if item.is_dir else {item.path}
    return found


@pytest.mark.full
def test_over_http_a_champion_is_downloaded_and_loaded_after_its_root_is_gone(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    root = tmp_path / "root"
    learnt = published(root, "far")
    assert learnt.refused == {} and learnt.verdict.endswith("no champion before: champion")
    weights = (root / "artifacts" / "export" / ("e" * 16) / "hf" / "model.safetensors").read_bytes()
    run_id, expected = learnt.run_id, {"quarantine.jsonl", "logs/one.log", "references.json", "manifest.json"}
    client = MlflowClient(server.url)
    assert files_of(client, run_id, "stages/convert") >= {f"stages/convert/{name}" for name in expected}
    assert "stages/train/metrics.jsonl" in files_of(client, run_id, "stages/train")
    shutil.rmtree(root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "MLFLOW_TRACKING_URI": server.url, "TMPDIR": str(elsewhere)}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.splitlines()[-1])
    assert place.is_relative_to(elsewhere) and (place / "model.safetensors").read_bytes() == weights


@pytest.mark.full
def test_an_upload_that_broke_goes_on_with_the_files_that_lack(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    tell(tmp_path, "broken")
    sent = []

    class Breaks:
        """A client that fails at the third file of the model."""

        def __init__(self, client):
            self.client = client

        def __getattr__(self, name):
            return getattr(self.client, name)

        def log_model_artifact(self, model_id, path, folder=None):
            sent.append(Path(path).name)
            if len(sent) == 3:
                raise ConnectionError("broken")
            self.client.log_model_artifact(model_id, path, folder)

    monkeypatch.setattr(flows.tracking.publish, "connect", lambda root: Breaks(connect(root)))
    with pytest.raises(ConnectionError):
        Publication(tmp_path, "broken").run()
    client, this_run = MlflowClient(server.url), f"run_id='{load_record(tmp_path, 'broken').learnt.run_id}'"
    assert not client.search_model_versions(this_run), "a version leads to whole files"
    Publication(tmp_path, "broken").run()
    names = [path.name for path in (tmp_path / "artifacts" / "export" / ("e" * 16) / "hf").iterdir()]
    assert sorted(sent) == sorted([*names, *FLAVOR_FILES, sent[2]]), "each once, but the one that broke"
    assert len(client.search_model_versions(f"name='{MODEL}' and {this_run}")) == 1


def test_without_a_server_the_same_bytes_get_a_second_name(tmp_path):
    published(tmp_path, "near")
    weights = tmp_path / "artifacts" / "export" / ("e" * 16) / "hf" / "model.safetensors"
    (version,) = connect(tmp_path).search_model_versions(f"name='{MODEL}'")
    place = Path(version.source.removeprefix("file://"))
    assert place.is_relative_to(tmp_path / "mlflow-artifacts") and (place / "hf" / weights.name).samefile(weights)


@pytest.mark.parametrize(("level", "more"), [("references", set()), ("small", {"quarantine.jsonl", "logs/one.log"})])
def test_what_stays_is_named_with_size_and_digest(tmp_path, level, more):
    client, run_id = connect(tmp_path), published(tmp_path, "refer", level).run_id
    chosen = {"manifest.json", "report.html", "report.json", "references.json", *more}
    assert files_of(client, run_id, "stages/convert") == {f"stages/convert/{name}" for name in chosen}
    listed = json.loads(Path(client.download_artifacts(run_id, "stages/convert/references.json")).read_text())
    assert listed["directory"] == f"artifacts/convert/{'c' * 16}"
    assert listed["files"]["train/shard-00000.tar"] == {"bytes": 5, "sha256": "a" * 64}
    assert listed["files"]["index/0.parquet"] == {"bytes": 5, "sha256": None}


def test_all_takes_every_file_also_of_a_run_that_was_sent_before(tmp_path):
    run_id = published(tmp_path, "more").run_id
    with changed(tmp_path, "more") as record:
        record.opening.artifacts = "all"
    Publication(tmp_path, "more").run()
    names = {path.removeprefix("stages/convert/") for path in files_of(connect(tmp_path), run_id, "stages/convert")}
    assert names - {"references.json"} == sizes_of(tmp_path / "artifacts" / "convert" / ("c" * 16)).keys()


def test_a_large_file_stays(tmp_path, monkeypatch):
    made = make_stage(tmp_path)
    (made.dir / "large.parquet").write_bytes(b"123")
    monkeypatch.setattr(flows.tracking.run_writer, "SMALL_BYTES", 2)
    assert {*chosen_files(made, "small", sizes_of(made.dir))} == {*made.shown_files(), "quarantine.jsonl"}


@pytest.mark.full
def test_by_reference_nothing_of_a_model_is_uploaded(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    client, learnt = MlflowClient(server.url), published(tmp_path, "reference", "references")
    model_id = client.get_run(learnt.run_id).data.tags["mlflow.athanor.model_id"]
    assert learnt.refused == {} and client.list_logged_model_artifacts(model_id) == []
    assert client.get_logged_model(model_id).tags["hf_dir"] == str(
        tmp_path / "artifacts" / "export" / ("e" * 16) / "hf"
    )


@pytest.mark.full
def test_an_adapter_goes_with_its_model(server, tmp_path, monkeypatch):
    """The registered directory holds the adapter. The run holds it too, except its weights, which references.json
    lists."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    exported = make_exported(tmp_path, "e" * 16)
    for folder in ("adapter", "hf/adapter"):
        (exported.dir / folder).mkdir()
        (exported.dir / folder / "adapter_config.json").write_text("{}")
        (exported.dir / folder / "adapter_model.safetensors").write_bytes(b"adapter")
    tracker = open_tracker(tmp_path, "adapter")
    tracker.log_stage(exported)
    tracker.register(exported, make_evaluated(tmp_path, "f" * 16, 12), exported.dir / "hf", f"{MODEL}-adapter")
    Publication(tmp_path, "adapter").run()
    client, run_id = MlflowClient(server.url), load_record(tmp_path, "adapter").learnt.run_id
    model_id = client.get_run(run_id).data.tags["mlflow.athanor.model_id"]
    listed = {item.path: item.file_size for item in client.list_logged_model_artifacts(model_id, "hf/adapter")}
    assert listed == {"hf/adapter/adapter_config.json": 2, "hf/adapter/adapter_model.safetensors": 7}
    names = files_of(client, run_id, "stages/export/adapter")
    assert names == {"stages/export/adapter/adapter_config.json"}
    left = json.loads(Path(client.download_artifacts(run_id, "stages/export/references.json")).read_text())["files"]
    assert left["adapter/adapter_model.safetensors"]["bytes"] == 7


class SlowUploads:
    """A client whose uploads of model weights take longer than the wait for an answer."""

    def __init__(self, client: MlflowClient, clock: ServerClock) -> None:
        self.client, self.clock = client, clock

    def __getattr__(self, name):
        return getattr(self.client, name)

    def log_model_artifact(self, model_id, path, folder=None):
        self.clock.answer_after(2 * WAIT_SECONDS if path.endswith(".safetensors") else 0)
        self.client.log_model_artifact(model_id, path, folder)


@pytest.fixture
def slow_uploads(monkeypatch) -> Iterator[ServerClock]:
    clock = ServerClock()
    monkeypatch.setattr(flows.tracking.tracker, "time", clock)
    monkeypatch.setattr(flows.tracking.publish, "connect", lambda root: SlowUploads(connect(root), clock))
    monkeypatch.setattr(flows.tracking.run_writer, "_link", lambda source, target: False)
    yield clock
    clock.end()


def test_an_upload_is_waited_for_as_long_as_its_bytes_may_take(tmp_path, monkeypatch, slow_uploads):
    monkeypatch.setattr(flows.tracking.run_writer, "_SLOWEST", 1.0)
    tell(tmp_path, "slow")
    sender, began = Sender(tmp_path), slow_uploads.monotonic()
    sender.follow("slow")
    assert not sender.wait("slow", is_cancelled=True), "a cancelled flow has to end"
    assert KILLED_SECONDS < slow_uploads.monotonic() - began < WAIT_SECONDS
    assert sender.wait("slow")
    assert slow_uploads.monotonic() - began > 2 * WAIT_SECONDS, "no test of the wait"
    assert load_record(tmp_path, "slow").learnt.verdict.endswith("champion")


def test_what_a_training_writes_goes_on_between_the_files_of_an_upload(tmp_path, monkeypatch, slow_uploads):
    tracker, rows = tell(tmp_path, "live"), []
    monkeypatch.setattr(RunWriter, "log_rows", lambda self, new, *_: rows.extend(new) or 0)
    monkeypatch.setattr(
        SlowUploads, "log_model_artifact", lambda self, *arguments: write_live(tracker, [timed_row(10 + len(rows))])
    )
    write_live(tracker, [timed_row(1)])
    publication = Publication(tmp_path, "live")
    publication.run()
    assert len({row["step"] for row in rows if row["step"] > 10}) > 3, "while the model was sent"


@pytest.mark.parametrize(("status", "passes"), [(413, False), (400, False), (401, True), (429, True), (503, True)])
def test_a_refused_upload_is_not_tried_for_ever(status, passes):
    answer = requests.Response()
    answer.status_code = status
    assert may_pass(requests.HTTPError("no", response=answer)) is passes
