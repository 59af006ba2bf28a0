"""The identity of a process, which no other process ever has, so that later code can detect whether it has ended."""

import os
import socket

import psutil

from dataset_builders.contracts.strict import StrictModel

_SAME_START_SECONDS = 2.0  # tolerance: two readings of one process's start differ by rounding


class Owner(StrictModel):
    """A process.

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
