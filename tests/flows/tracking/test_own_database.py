"""The root's own MLflow database: half-made tables, a ruined file, a file that may not be written."""

import os
import sqlite3

import pytest

from dataset_builders.errors import InputError
from flows.tracking import store
from flows.tracking.publish import Publication
from flows.tracking.record import error_line
from tests.helpers.tracked_run import Nobody, make_trained, open_tracker

pytestmark = pytest.mark.promise(
    "A minute without processors, a jumping clock, a deleted root, a bad database, few open files or a full "
    "disk costs no finished work."
)


def test_a_kill_while_the_tables_are_made_costs_nothing(tmp_path, monkeypatch):
    """MLflow never repairs tables that are half made, so a file under the final name has all of them."""

    def killed(address, _files):
        with sqlite3.connect(address.removeprefix("sqlite:///")) as database:
            database.execute("CREATE TABLE runs (id INTEGER)")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "SqlAlchemyStore", killed)
        store.connect(tmp_path)
    assert store.connect(tmp_path).search_experiments()[0].name == "Default"
    assert not list(tmp_path.glob("mlflow.db.tmp*"))


@pytest.mark.parametrize("how", ["garbage", "cut", "closed"])
def test_a_ruined_database_is_named_with_the_way_out(tmp_path, monkeypatch, how):
    monkeypatch.setattr("flows.tracking.tracker.sender_of", lambda root: Nobody())
    store.connect(tmp_path)
    database = tmp_path / store.DATABASE
    if how == "closed":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != database and access(path, mode))
        monkeypatch.setattr("flows.tracking.publish.connect", lambda root: 1 / 0)
    else:
        database.write_bytes(os.urandom(50_000) if how == "garbage" else database.read_bytes()[:200_000])
    tracker = open_tracker(tmp_path, "a" * 16)
    tracker.log_stage(make_trained(tmp_path, "d" * 16, 1))
    with pytest.raises(InputError) as caught:
        Publication(tmp_path, tracker.key).run()
    line = error_line(caught.value)
    assert line.startswith(str(database)) and not tracker.is_sent()
    assert ("cannot be written; permit it" if how == "closed" else f"move {database}* away") in line


def test_a_directory_in_its_place_is_named_before_mlflow_tries_to_open_it(tmp_path, monkeypatch):
    (tmp_path / store.DATABASE).mkdir()
    monkeypatch.setattr(store, "MlflowClient", lambda **_: 1 / 0)
    with pytest.raises(InputError, match=f"{store.DATABASE} is no whole SQLite database .it is no file.; put a copy"):
        store.connect(tmp_path)
