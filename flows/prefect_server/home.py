"""The directory of Prefect's files of a root: its settings, and its database unless Postgres is used."""

import os
from pathlib import Path

from dataset_builders.storage.sqlite_file import check_database
from dataset_builders.storage.store import StorePath, side_dir

SCHEMA_LOCK = "schema.lock"


def prefect_home(root: StorePath) -> Path:
    """Return PREFECT_HOME if it is set, else a directory below the root."""
    return Path(os.environ.get("PREFECT_HOME") or side_dir(root) / "prefect")


def check_prefect_database(home: Path) -> None:
    """Check the database of Prefect's server, if it is a file of PREFECT_HOME.

    Raises:
        InputError: the database is ruined or cannot be written.
    """
    check_database(home / "prefect.db", "the states of earlier flow runs; artifacts and scores stay")
