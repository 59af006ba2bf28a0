"""Prefect's tables from the cache: a fresh home begins with them, one that has its own keeps them."""

import sqlite3

import pytest

from flows.service.prefect_template import DATABASE, keep_tables, marker, take_tables


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    return make_home(tmp_path / "home", flows=[])


def make_home(home, flows: list[str]):
    home.mkdir()
    with sqlite3.connect(home / DATABASE) as database:
        database.execute("CREATE TABLE flow (name TEXT)")
        database.executemany("INSERT INTO flow VALUES (?)", [(name,) for name in flows])
    return home


def flows_of(home) -> list[tuple]:
    with sqlite3.connect(home / DATABASE) as database:
        return database.execute("SELECT name FROM flow").fetchall()


def test_a_fresh_home_begins_with_the_kept_tables(home, tmp_path):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert not take_tables(fresh) and not list(fresh.iterdir()), "nothing is kept yet"
    keep_tables(home)
    assert take_tables(fresh) and marker(fresh).exists() and flows_of(fresh) == []
    assert {path.name for path in fresh.iterdir()} == {DATABASE, marker(fresh).name}


def test_a_home_with_a_database_keeps_it(home, tmp_path):
    keep_tables(home)
    used = make_home(tmp_path / "used", ["mine"])
    assert not take_tables(used), "whose version its tables are, nobody knows"
    assert flows_of(used) == [("mine",)]
    marker(used).touch()
    assert take_tables(used) and flows_of(used) == [("mine",)]


def test_what_holds_somebodys_flows_is_not_kept(home, tmp_path):
    used = make_home(tmp_path / "used", ["mine"])
    keep_tables(used)
    assert not list((tmp_path / "cache" / "prefect").iterdir())


def test_a_cache_that_cannot_be_written_costs_nothing(home, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "file"))
    keep_tables(home)
    assert flows_of(home) == []
