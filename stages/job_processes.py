"""The processes of a job on this host: found by the job's name in their environment, asked to save, ended."""

import contextlib
import os
import signal
import time

import psutil

JOB_VARIABLE = "ATHANOR_JOB"  # the job's name, in the environment of all its processes
LEFTOVER_SECONDS = 3.0  # for torchrun and the workers' helpers to follow, once the workers are gone


def processes_of(name: str) -> list[psutil.Process]:
    """Every process of a job but this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB_VARIABLE) == name and process.pid != os.getpid():
                found.append(process)
    return found


def end_processes(processes: list[psutil.Process], grace_seconds: float) -> None:
    """SIGTERM to the workers, wait for them, SIGKILL to whatever is left. An interrupted wait kills at once."""
    workers = _workers(processes)
    try:
        for process in workers:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        _wait_gone(workers, grace_seconds)
        _wait_gone(processes, LEFTOVER_SECONDS)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_gone(processes, LEFTOVER_SECONDS)


def _wait_gone(processes: list[psutil.Process], seconds: float) -> None:
    # psutil.wait_procs would reap our own child and with it the exit status that Popen reports.
    deadline = time.monotonic() + seconds
    while any(runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    """Whether it is there and no zombie."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Whom to ask to stop: the trainer's ranks; not their helpers, which they end themselves.

    Nor torchrun, which would cut its workers' grace to 30 s and ends when they have; alone, it is asked.
    """
    agents, parents = set(), {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            if "torch.distributed.run" in process.cmdline():
                agents.add(process.pid)
    tops = [p for p in processes if p.pid not in agents and parents.get(p.pid) not in parents.keys() - agents]
    return tops or processes
