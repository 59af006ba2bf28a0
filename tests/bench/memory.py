"""The memory of this process, and of a call in a process of its own. Imports nothing, so that it adds nothing."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def memory(field: str = "VmHWM", process: int | str = "self") -> int:
    """Return the bytes of a process, by default at its peak; VmRSS is the present. The peak of getrusage would
    include the parent's memory."""
    return 1024 * int(Path(f"/proc/{process}/status").read_text().partition(f"{field}:")[2].split()[0])


def alone(function: Callable[..., T], *args: object) -> tuple[T, int, int]:
    """Return (the function's result, bytes of memory at the peak before it, at the peak after it) of a new process that
    runs nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_with_memory, (function, args))


def _with_memory(function: Callable[..., T], args: tuple) -> tuple[T, int, int]:
    before = memory()
    result = function(*args)
    return result, before, memory()
