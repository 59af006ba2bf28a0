"""Tasks for workers of a cluster: ones that die, ones that fail, ones that take their time. Light to import."""

import os
import signal
import time
from pathlib import Path


def kill_itself_once(marker: str) -> str:
    """Kill -9 the process that runs this, unless the marker says that it was done before."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return marker


def kill_itself(_: object) -> None:
    """Kill -9 the process that runs this."""
    os.kill(os.getpid(), signal.SIGKILL)


def work_until_released(directory: str) -> None:
    """Leave `began`, wait for `release`, leave `ended`."""
    Path(directory, "began").touch()
    while not Path(directory, "release").exists():
        time.sleep(0.02)
    Path(directory, "ended").touch()


def slow_or_failing(task: tuple[str, str]) -> None:
    """("slow", directory): leave `began`, and `ended` a second later. ("fail", directory): fail once that has begun."""
    kind, directory = task
    if kind == "slow":
        Path(directory, "began").touch()
        time.sleep(1)
        Path(directory, "ended").touch()
        return
    while not Path(directory, "began").exists():
        time.sleep(0.02)
    raise ValueError("failed beside another")
