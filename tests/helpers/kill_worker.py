"""Tasks for workers of a cluster: tasks that kill the worker, tasks that fail, and slow tasks. Quick to import."""

import os
import signal
import time
from pathlib import Path


def kill_itself_once(marker: str) -> str:
    """Kill -9 the process that runs this, unless the marker shows that this was done before."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return marker


def kill_itself(_: object) -> None:
    """Kill -9 the process that runs this."""
    os.kill(os.getpid(), signal.SIGKILL)


def work_until_released(directory: str) -> None:
    """Write the file `began`, wait for the file `release`, and write the file `ended`."""
    Path(directory, "began").touch()
    while not Path(directory, "release").exists():
        time.sleep(0.02)
    Path(directory, "ended").touch()


def slow_or_failing(task: tuple[str, str]) -> None:
    """Run a task. ("slow", directory): write `began`, and `ended` a second later. ("fail", directory): fail once
    `began` exists."""
    kind, directory = task
    if kind == "slow":
        Path(directory, "began").touch()
        time.sleep(1)
        Path(directory, "ended").touch()
        return
    while not Path(directory, "began").exists():
        time.sleep(0.02)
    raise ValueError("failed beside another")
