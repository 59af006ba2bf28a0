"""`athanor backup`: the copy is a root whose versions load, made while another process writes."""

import shutil
import sqlite3
from pathlib import Path

import mlflow
import pytest

from flows.cli.backup import copy_database
from flows.cli.main import main
from flows.libraries.prefect_private import OPEN_TABLES
from flows.tracking.publish import Publication
from flows.tracking.record import changed, load_record
from flows.tracking.store import connect, tracking_uri
from flows.tracking.tracker import publish_waiting
from tests.helpers.tracked_run import MODEL, Nobody, holdings, open_tracker, tell_a_run

pytestmark = pytest.mark.promise(
    "A root that is copied or moved continues there, and a registered model loads over HTTP on another machine."
)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A root with a finished run, whose model is registered."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "root" / "prefect"))
    monkeypatch.setattr("flows.tracking.tracker.sender_of", lambda root: Nobody())
    root = tmp_path / "root"
    tell_a_run(root, "one")
    Publication(root, "one").run()
    (root / ".athanor-root").touch()
    (root / "prefect").mkdir()
    with sqlite3.connect(root / "prefect" / "prefect.db") as database:
        database.execute("PRAGMA journal_mode=wal")
        for table in OPEN_TABLES:
            database.execute(f"CREATE TABLE {table} (id, state_type)")
        database.execute("CREATE TABLE concurrency_limit_v2 (name, active_slots)")
        database.execute("INSERT INTO concurrency_limit_v2 VALUES ('gpu-host', 1)")
    return root


def test_a_backup_is_a_root_when_the_other_is_gone(root, tmp_path, monkeypatch, capsys):
    expected, backup = holdings(connect(root), "one"), tmp_path / "backups" / "monday"
    tell_a_run(root, "two")  # MLflow does not have it yet
    assert main(["backup", str(backup), "--root", str(root)]) == 0
    assert "It is a root" in capsys.readouterr().out
    model = backup / "artifacts" / "export" / ("e" * 16) / "hf" / "model.safetensors"
    assert model.stat().st_nlink == 2, "the model's files are in it once"
    assert (backup / "artifacts" / "evaluate" / ("f" * 16) / "predictions.parquet").is_file()
    assert not (backup / "artifacts" / "train").exists() and not (backup / "service").exists()
    assert backup.stat().st_mode & 0o077 == 0
    with sqlite3.connect(backup / "prefect" / "prefect.db") as database:
        assert database.execute("SELECT count(*) FROM flow_run").fetchone() == (0,)
        assert database.execute("SELECT * FROM concurrency_limit_v2").fetchone() == ("gpu-host", 0)
    shutil.rmtree(root)
    assert holdings(connect(backup), "one") == expected
    assert load_record(backup, "one").learnt.refused == {} and load_record(backup, "two").is_waiting()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(backup))
    place = mlflow.artifacts.download_artifacts(f"models:/{MODEL}@champion")
    assert Path(place).is_relative_to(backup) and (Path(place) / "hf" / "model.safetensors").read_bytes() == b"weights"


def test_a_run_that_went_on_has_ended_in_a_backup_whatever_its_host(root, tmp_path):
    tracker = open_tracker(root, "two")
    with changed(root, "two") as record:
        record.owner = record.owner.model_copy(update={"host": "another"})
    before = load_record(root, "one")
    assert main(["backup", str(tmp_path / "copy"), "--root", str(root)]) == 0
    copied = load_record(tmp_path / "copy", "two")
    assert (copied.status, copied.is_waiting()) == ("KILLED", True)
    assert load_record(tmp_path / "copy", "one") == before
    assert load_record(root, "two").status is None
    tracker.finish("FINISHED")


def test_a_run_goes_on_in_a_backup(root, tmp_path):
    assert main(["backup", str(tmp_path / "copy"), "--root", str(root)]) == 0
    tell_a_run(tmp_path / "copy", "two")
    (published,) = publish_waiting(tmp_path / "copy")
    assert published.problem == ""


def test_a_database_is_copied_as_it_was_at_one_moment(tmp_path):
    source = tmp_path / "source.db"
    writer = sqlite3.connect(source)
    writer.execute("PRAGMA journal_mode=wal")  # what was committed is not in the file itself yet
    writer.execute("CREATE TABLE t (number)")
    writer.execute("INSERT INTO t VALUES (1)")
    writer.commit()
    writer.execute("INSERT INTO t VALUES (2)")  # not committed
    copy_database(source, tmp_path / "copy.db")
    writer.commit()
    writer.close()
    with sqlite3.connect(tmp_path / "copy.db") as copy:
        assert copy.execute("SELECT number FROM t").fetchall() == [(1,)]


@pytest.mark.parametrize("where", ["full", "inside", "nothing", "ruined"])
def test_a_backup_is_refused_in_one_line(root, tmp_path, where, capsys):
    to = tmp_path / "to"
    words = "give a new directory"
    if where == "full":
        to.mkdir()
        (to / "mine").touch()
    elif where == "inside":
        to, words = root / "backup", f"is in the root; give a new directory, as {root.with_name('backup-1')}"
    elif where == "nothing":
        root, words = tmp_path / "nothing", "no .athanor-root"
    else:
        (root / "mlflow.db").write_bytes(b"x" * 9000)
        words = "is no whole SQLite database"
    assert main(["backup", str(to), "--root", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not (to / "tracking").exists()
