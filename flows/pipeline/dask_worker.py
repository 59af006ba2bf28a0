"""Functions that run inside a Dask worker. They import neither Prefect nor a stage, so that the first call is quick."""

import functools
import hashlib
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dataset_builders.known_version import installed_version
from dataset_builders.storage.store import location

Task = TypeVar("Task")
Result = TypeVar("Result")

KEY_PREFIX = "athanor"  # start of the keys of shard tasks
# Packages that, together with athanor's code, decide the bytes of data artifacts.
_PACKAGES = ("numpy", "pillow", "pyarrow", "simplejpeg", "tokenizers", "torch", "transformers", "webdataset")
_CODE = ("dataset_builders", "stages")
_RUNNING = ("executing", "long-running", "cancelled", "resumed")  # Dask's task states in which a thread is busy

# The tasks of a process share an encoder, which is not thread-safe.
_one_at_a_time = threading.Lock()


def run_shard_task(function: Callable[[Task], Result], task: Task) -> Result:
    """Return the function's result for the task. In a worker with several threads, tasks run one after the other."""
    with _one_at_a_time:
        return function(task)


def look(marker: str, token: str, places: Sequence[str]) -> dict[str, Any]:
    """Report the files and packages that this worker sees.

    Args:
        marker: a file that the flow's process has just written; its text is `token`.
        places: directories that the worker must see.

    Returns:
        "host": the worker's host name. "unseen": the first directory that does not exist here, the marker's directory
        if the marker is missing, or None. "versions": package -> version.
    """
    try:
        has_marker = location(marker).read_text() == token
    except OSError:
        has_marker = False
    unseen = [place for place in places if not location(place).is_dir()]
    if not has_marker:
        unseen.insert(0, str(location(marker).parent))
    return {"host": socket.gethostname(), "unseen": unseen[0] if unseen else None, "versions": versions()}


@functools.cache
def versions() -> dict[str, str]:
    """Return package -> version for the packages that decide bytes, and "athanor's code" -> a digest of its files."""
    installed = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name in _PACKAGES:
        installed[name] = installed_version(name) or "none"
    return installed | {"athanor's code": _code_digest()}


def running_tasks(dask_worker: Any) -> list[tuple[str, bool]]:
    """Return the shard tasks that threads of this worker are running: (key, whether the task was cancelled).

    Args:
        dask_worker: filled in by `Client.run`.
    """
    tasks = [task for task in dask_worker.state.tasks.values() if task.state in _RUNNING]
    return [(task.key, task.state == "cancelled") for task in tasks if str(task.key).startswith(KEY_PREFIX)]


def _code_digest() -> str:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for name in _CODE for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
