"""Functions that run inside a Dask worker. They load neither Prefect nor a stage, so that the first look is quick."""

import functools
import hashlib
import importlib.metadata
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dataset_builders.storage.store import location

Task = TypeVar("Task")
Result = TypeVar("Result")

KEY_PREFIX = "athanor"  # of the keys of shard tasks
# Packages that, with our own code, decide the bytes of data artifacts.
_PACKAGES = ("numpy", "pillow", "pyarrow", "simplejpeg", "tokenizers", "torch", "transformers", "webdataset")
_CODE = ("dataset_builders", "stages")
_RUNNING = ("executing", "long-running", "cancelled", "resumed")  # states of Dask's worker in which a thread is busy

# The tasks of a process share an encoder, which is not made for threads.
_one_at_a_time = threading.Lock()


def run_shard_task(function: Callable[[Task], Result], task: Task) -> Result:
    """The function's result for the task; in a worker of several threads, one task after the other."""
    with _one_at_a_time:
        return function(task)


def look(marker: str, token: str, places: Sequence[str]) -> dict[str, Any]:
    """The files and packages that this worker sees.

    Args:
        marker: a file that the flow's process has just written; its text is `token`.
        places: directories.

    Returns:
        host; unseen: the first directory that is not there (the marker's, if the marker is not), or None; versions:
        package -> version.
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
    """Package -> version, for those that decide bytes; "athanor's code" -> a digest of its files."""
    installed = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "none"
    return installed | {"athanor's code": _code_digest()}


def running_tasks(dask_worker: Any) -> list[tuple[str, bool]]:
    """The shard tasks that threads of this worker are busy with: (key, whether nobody wants the task any more).

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
