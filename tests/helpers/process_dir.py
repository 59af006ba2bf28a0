"""A directory for what a process of the tests makes once."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def process_dir(prefix: str) -> Path:
    """Return a new directory, which is deleted when this process ends, but not when its forks end."""
    directory = Path(tempfile.mkdtemp(prefix=f"athanor-{prefix}-"))
    atexit.register(_delete, directory, os.getpid())
    return directory


def _delete(directory: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
