"""Processes on this host. Those of a job are found by its name in their environment, and stopped with time to save. An
Owner is a process by its identity, so that later code can tell whether it has ended."""

import contextlib
import os
import signal
import socket
import time

import psutil

from dataset_builders.contracts.strict import StrictModel

JOB_VARIABLE = "ATHANOR_JOB"  # environment variable of all processes of a job: the job's name
LEFTOVER_SECONDS = 3.0  # for torchrun and the workers' helpers to end, after the workers have ended
_SAME_START_SECONDS = 2.0  # tolerance: two readings of one process's start differ by rounding


def processes_of(name: str) -> list[psutil.Process]:
    """Return every process of a job, except this one."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB_VARIABLE) == name and process.pid != os.getpid():
                processes.append(process)
    return processes


def running_jobs() -> set[str]:
    """Return the names of all jobs that have a process on this host."""
    names = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            names.add(process.environ().get(JOB_VARIABLE, ""))
    return names - {""}


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
    # psutil.wait_procs would reap our own child, and Popen would lose its exit status.
    deadline = time.monotonic() + seconds
    while any(runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    """Whether the process exists and is not a zombie."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes to stop: the trainer's ranks, which end their helpers themselves.

    torchrun is included only if it has no ranks: on SIGTERM it would cut its ranks' grace to 30 s, and it ends when
    they have ended.
    """
    agents, parents = set(), {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            if "torch.distributed.run" in process.cmdline():
                agents.add(process.pid)
    tops = [p for p in processes if p.pid not in agents and parents.get(p.pid) not in parents.keys() - agents]
    return tops or processes


class Owner(StrictModel):
    """The identity of a process, which no other process ever has.

    Attributes:
        pid_started: start time in seconds since 1970; with the pid, it identifies a process forever.
        host: name of the process's host.
    """

    pid: int
    pid_started: float
    host: str

    @classmethod
    def of_this_process(cls) -> "Owner":
        return Owner(pid=os.getpid(), pid_started=psutil.Process().create_time(), host=socket.gethostname())

    def is_dead(self) -> bool:
        """Whether the process has certainly ended: it ran on this host and is gone. False on other hosts."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            is_other = abs(process.create_time() - self.pid_started) > _SAME_START_SECONDS
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False
