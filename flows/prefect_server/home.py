"""The directory of Prefect's files of a root: its settings, and its database unless Postgres is used."""

import os
from pathlib import Path

from dataset_builders.storage.store import StorePath, side_dir

SCHEMA_LOCK = "schema.lock"


def prefect_home(root: StorePath) -> Path:
    """Return PREFECT_HOME if it is set, else a directory below the root."""
    return Path(os.environ.get("PREFECT_HOME") or side_dir(root) / "prefect")
