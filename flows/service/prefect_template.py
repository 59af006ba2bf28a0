"""Prefect's tables, made once on a machine: an empty database in the cache that a fresh root begins with a copy of.

Prefect makes them by some hundred migrations, eight seconds of the thirteen that its first start takes.

    $ATHANOR_CACHE_DIR/prefect/3.8.8.db     empty tables of that version of Prefect
    <PREFECT_HOME>/schema-3.8.8             the tables of this home are that version's
"""

import contextlib
import importlib.metadata
import os
import shutil
import sqlite3
import uuid
from pathlib import Path

from dataset_builders.contracts.local_cache import cache_dir

DATABASE = "prefect.db"


def marker(home: Path) -> Path:
    """The file that says that the tables of a home are made."""
    return home / f"schema-{_version()}"


def take_tables(home: Path) -> bool:
    """Begin a home that has no database with the cached one; the caller holds the home's schema lock.

    Returns:
        whether the tables of the home are made.
    """
    if marker(home).exists() or (home / DATABASE).exists() or not _template().is_file():
        return marker(home).exists()
    part = home / f"{DATABASE}.{uuid.uuid4().hex}"
    try:
        shutil.copyfile(_template(), part)
        os.replace(part, home / DATABASE)
    except OSError:  # the disk is full, the cache was emptied: then Prefect makes them
        part.unlink(missing_ok=True)
        return False
    marker(home).touch()
    return True


def keep_tables(home: Path) -> None:
    """Keep a copy of a database that nothing has been written to yet; not where the cache cannot be written."""
    with contextlib.suppress(OSError, sqlite3.Error):
        _template().parent.mkdir(parents=True, exist_ok=True)
        part = _template().with_name(uuid.uuid4().hex)
        try:
            source, copy = sqlite3.connect(home / DATABASE), sqlite3.connect(part)
            with contextlib.closing(source), contextlib.closing(copy):
                source.backup(copy)
                is_empty = copy.execute("SELECT count(*) FROM flow").fetchone() == (0,)
            if is_empty:
                os.replace(part, _template())
        finally:
            part.unlink(missing_ok=True)


def _template() -> Path:
    return cache_dir() / "prefect" / f"{_version()}.db"


def _version() -> str:
    return importlib.metadata.version("prefect")
