"""Where Prefect keeps what belongs to a root: its database, unless there is a Postgres, and its settings."""

import os
from pathlib import Path

from dataset_builders.contracts.store import StorePath, side_dir

SCHEMA_LOCK = "schema.lock"


def prefect_home(root: StorePath) -> Path:
    """PREFECT_HOME where it is set, else below the root."""
    return Path(os.environ.get("PREFECT_HOME") or side_dir(root) / "prefect")
