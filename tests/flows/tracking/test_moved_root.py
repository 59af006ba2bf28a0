"""A root that was copied or moved uses only its own files, and its runs continue there."""

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path

import mlflow
import pytest

import flows.tracking.tracker
from flows.tracking.publish import Publication
from flows.tracking.record import find_place, load_record, place_in, records_dir
from flows.tracking.store import connect, tracking_uri
from flows.tracking.tracker import publish_waiting
from tests.helpers.tracked_run import EXPERIMENT, MODEL, Nobody, holdings, tell_a_run

pytestmark = pytest.mark.promise(
    "A root that is copied or moved continues there, and a registered model loads over HTTP on another machine."
)


@pytest.fixture(autouse=True)
def nobody_sends(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())


@pytest.fixture
def root(tmp_path) -> Path:
    """Make a root with a finished run. Its name has letters that a URL escapes."""
    root = tmp_path / "the first r\u00f6ot"
    tell_a_run(root, "one")
    Publication(root, "one").run()
    return root


def state_of(root: Path) -> dict[str, tuple[str, int, int]]:
    """Return the digest, the time and the number of links of every file."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, path.stat().st_nlink)
        for path in files
    }


def files_that_name(root: Path, path: Path) -> set[str]:
    """Return the files of a root that contain a path or its URL."""
    needles = (str(path).encode(), path.as_uri().encode(), json.dumps(str(path))[1:-1].encode())
    return {file.name for file in root.rglob("*") if file.is_file() and any(n in file.read_bytes() for n in needles)}


def test_a_copy_goes_on_by_itself_and_leaves_the_original_alone(root, tmp_path, monkeypatch):
    expected, before = holdings(connect(root), "one"), state_of(root)
    copy = shutil.copytree(root, tmp_path / "copy", symlinks=True)
    tell_a_run(copy, "two")
    Publication(copy, "two").run()
    Publication(copy, "one").run()
    assert state_of(root) == before, "nothing was written there"
    client = connect(copy)
    run = client.get_run(load_record(copy, "two").learnt.run_id)
    assert run.info.artifact_uri.startswith((copy / "mlflow-artifacts").as_uri())
    shutil.rmtree(root)
    same = {"aliases": {}, "runs": 0, "models": 0}  # of both runs
    assert holdings(client, "one") | same == expected | same
    first = load_record(copy, "one").learnt
    assert first.refused == {}
    assert "step" in Path(client.download_artifacts(first.run_id, "stages/train/metrics.jsonl")).read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(copy))
    place = mlflow.artifacts.download_artifacts(f"models:/{MODEL}@champion")
    assert Path(place).is_relative_to(copy) and (Path(place) / "hf" / "model.safetensors").read_bytes() == b"weights"


def test_no_address_of_the_old_place_is_left(root, tmp_path):
    moved = root.rename(tmp_path / "moved")
    connect(moved)
    with sqlite3.connect(moved / "mlflow.db") as database:
        database.execute("VACUUM")  # free pages of the database still hold overwritten values
    assert files_that_name(moved, root) == set()


def test_a_run_that_waited_is_sent_from_the_new_place(tmp_path):
    tell_a_run(tmp_path / "before", "one")
    record = records_dir(tmp_path / "before") / "one.json"
    assert str(tmp_path) not in record.read_text(), "a record names no place outside its root"
    moved = (tmp_path / "before").rename(tmp_path / "after")
    (published,) = publish_waiting(moved)
    assert published.problem == "" and published.sent["stage"] == 2
    assert load_record(moved, "one").learnt.refused == {}


def test_another_name_of_the_same_directory_changes_nothing(root, tmp_path):
    expected = connect(root).get_experiment_by_name(EXPERIMENT).artifact_location
    (tmp_path / "link").symlink_to(root)
    assert connect(tmp_path / "link").get_experiment_by_name(EXPERIMENT).artifact_location == expected


def test_what_lies_elsewhere_stays_there(root, tmp_path):
    for name in ("elsewhere", "mlflow-artifacts-2"):
        connect(root).create_experiment(name, (tmp_path / name).as_uri())
    moved = root.rename(tmp_path / "moved")
    for name in ("elsewhere", "mlflow-artifacts-2"):
        assert connect(moved).get_experiment_by_name(name).artifact_location == (tmp_path / name).as_uri()


def test_places(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside" / "artifacts" / "train" / "f"
    assert place_in(root, root / "artifacts" / "train" / "f") == "artifacts/train/f"
    assert find_place(root, "artifacts/train/f") == root / "artifacts" / "train" / "f"
    assert find_place(root, place_in(root, outside)) == outside
    url = "memory://bucket/runs/artifacts/train/f"
    assert str(find_place(tmp_path, url)) == url
