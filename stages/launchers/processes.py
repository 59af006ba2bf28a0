"""The processes of a job on this host: found by the job's name in their environment, stopped after they saved."""

import contextlib
import os
import signal
import time

import psutil

JOB_VARIABLE = "ATHANOR_JOB"  # the job's name, in the environment of all its processes
LEFTOVER_SECONDS = 3.0  # for torchrun and the workers' helpers to end, once the workers have


def processes_of(name: str) -> list[psutil.Process]:
    """Every process of a job, except this one."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB_VARIABLE) == name and process.pid != os.getpid():
                processes.append(process)
    return processes


def end_processes(processes: list[psutil.Process], grace_seconds: float) -> None:
    """Send SIGTERM to the workers, wait for them, kill the rest. If the wait is interrupted, kill at once."""
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
    """Whether it exists and is not a zombie."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes to stop: the trainer's ranks, which end their helpers themselves.

    torchrun is one of them only if it is alone: it would cut its ranks' grace to 30 s, and ends when they have ended.
    """
    agents, parents = set(), {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            if "torch.distributed.run" in process.cmdline():
                agents.add(process.pid)
    tops = [p for p in processes if p.pid not in agents and parents.get(p.pid) not in parents.keys() - agents]
    return tops or processes
