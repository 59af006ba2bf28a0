"""`python -m flows.service.engine`: Prefect's engine for one flow run, which writes directly into the worker's log.

A worker reads the output of its flow runs through pipes, which break when the worker is killed. Prefect writes its log
lines with rich, which ends a process whose pipe is broken (Console.on_broken_pipe). So the flow would end while its
trainer is saving.
"""

import os
import sys
from pathlib import Path

from flows.prefect_server.processes import SERVICE_VARIABLE


def print_into(path: Path) -> None:
    """Append this process's standard output and error to a file."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    print_into(Path(os.environ[SERVICE_VARIABLE], "service", "worker.log"))
    os.execv(sys.executable, [sys.executable, "-m", "prefect.engine", *sys.argv[1:]])
