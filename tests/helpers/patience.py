"""Time limits that follow the machine: the tests' numbers are for a quick one, and grow with the seconds that this one
needs to start a process."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable

_VARIABLE = "ATHANOR_TESTS_START_SECONDS"
_QUICK_SECONDS = 0.4  # for a start on the machine that the numbers are written for


def measure_start() -> None:
    """Measure how fast this machine starts a process, once for a session: processes of pytest-xdist inherit the
    result."""
    if _VARIABLE not in os.environ:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import numpy, pydantic, yaml, fsspec"], check=True)
        os.environ[_VARIABLE] = f"{time.monotonic() - began:.2f}"


@functools.cache
def at_most(seconds: float) -> float:
    """Return a time limit for this machine: as many starts of a process as `seconds` are on a quick one."""
    return seconds * max(1.0, float(os.environ.get(_VARIABLE, _QUICK_SECONDS)) / _QUICK_SECONDS)


def wait_for(condition: Callable[[], object], seconds: float, what: str, about: Callable[[], str] = str) -> object:
    """Wait for the first true value of `condition` and return it.

    Args:
        seconds: time limit on a quick machine.
        about: gives what an error says beside `what`, the name of the condition.

    Raises:
        AssertionError: the condition is not true within the limit.
    """
    deadline = time.monotonic() + at_most(seconds)
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"no {what} within {at_most(seconds):.0f} s\n{about()}"
        time.sleep(0.02)
    return answer
