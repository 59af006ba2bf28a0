"""`python -m flows.service.engine`: Prefect's engine for one flow run, which prints into the worker's log by itself.

A worker takes what its flow runs print through pipes. When it is killed they break, and rich, by which Prefect writes
its log lines, ends a process whose pipe is broken (Console.on_broken_pipe): the flow would end in the middle of
letting its trainer save.
"""

import os
import sys
from pathlib import Path

from flows.service.processes import SERVICE_VARIABLE


def print_into(path: Path) -> None:
    """Lead this process's standard output and error to the end of a file."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    print_into(Path(os.environ[SERVICE_VARIABLE], "service", "worker.log"))
    os.execv(sys.executable, [sys.executable, "-m", "prefect.engine", *sys.argv[1:]])
