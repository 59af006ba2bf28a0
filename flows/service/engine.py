"""`python -m flows.service.engine WORKER`: Prefect's engine for one flow run, which ends with its worker.

A flow run is not killed with its worker: it gets SIGTERM and saves. But a worker reads the output of its flow runs
through pipes, which break when it is killed. Prefect writes its log lines with rich, which ends a process whose pipe is
broken (Console.on_broken_pipe). So the flow would end while its trainer is saving. Therefore a flow run of `athanor up`
writes directly into the worker's log.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

from flows.pipeline.processes import SERVICE_VARIABLE
from stages.shared.launchers.parent import end_with_parent


def print_into(path: Path) -> None:
    """Append this process's standard output and error to a file."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    if SERVICE_VARIABLE in os.environ:
        print_into(Path(os.environ[SERVICE_VARIABLE], "service", "worker.log"))

    from dataset_builders.errors import InputError
    from flows.pipeline.run_record import record_run
    from flows.service.request import service_root

    with contextlib.suppress(InputError):  # the flow says that it has no root
        record_run(service_root())  # before the run's state says that it is running: see `reconcile`
    runpy.run_module("prefect.engine", run_name="__main__")
