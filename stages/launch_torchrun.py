"""torchrun on this host.

A job's processes carry its name in their environment, because torchrun gives every worker a session of its own:
killing torchrun's process group would leave the workers, and a name also finds what a killed parent left behind.
"""

import contextlib
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from stages.cluster_config import ClusterConfig
from stages.job_processes import JOB_VARIABLE, LEFTOVER_SECONDS, end_processes, processes_of
from stages.launch import (
    EXIT_DEADLINE,
    NOTHING_NEW,
    TRAINER_ENVIRONMENT,
    Handle,
    Job,
    JobFailed,
    new_lines,
)
from stages.rank_logs import as_rank, remove_rank_logs


@dataclass(slots=True, kw_only=True)
class TorchrunHandle(Handle):
    """A job of this host."""

    process: subprocess.Popen
    deadline: float
    reader: Iterator[str]


class TorchrunLauncher:
    """torchrun on this host, never restarting by itself: a failed run goes on from its checkpoint when run again."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    def check(self) -> None:
        """Nothing to see: torchrun comes with torch."""

    def command(self, job: Job) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", "--no-python"]
        rank = as_rank(job.log_path.parent, [sys.executable, *job.arguments])
        return [sys.executable, *torchrun, f"--nproc-per-node={self.cluster.processes}", *rank]

    def plan(self, job: Job) -> str:
        """The command line that `submit` would run."""
        return shlex.join(self.command(job))

    def submit(self, job: Job) -> TorchrunHandle:
        """Start the job; the log file is begun anew and everything the job prints goes there."""
        end_processes(processes_of(job.name), self.cluster.stop_grace_seconds)
        command = self.command(job)
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        remove_rank_logs(job.log_path)
        # A file, not a pipe: a job that prints is never stopped by a parent that does not read, or is gone.
        with job.log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(job.name),
                start_new_session=True,
            )
        deadline = time.monotonic() + self.cluster.timeout_seconds
        return TorchrunHandle(
            job=job, command=command, process=process, deadline=deadline, reader=new_lines(job.log_path)
        )

    def poll(self, handle: TorchrunHandle) -> int | None:
        """None while it runs; hands new lines of the log to `on_line`.

        Raises:
            JobFailed: the deadline has passed; the job is cancelled before.
        """
        status = handle.process.poll()
        for line in handle.reader:
            if line == NOTHING_NEW:
                break
            handle.lines.append(line)
            handle.job.on_line(line)
        if status is None and time.monotonic() > handle.deadline:
            self.cancel(handle)
            raise JobFailed(f"stopped after timeout_seconds={self.cluster.timeout_seconds:g}", handle, EXIT_DEADLINE)
        return status

    def cancel(self, handle: TorchrunHandle) -> None:
        """SIGTERM to the workers, time to save, then SIGKILL to whatever is left. Does nothing to an ended job."""
        # A process shows no environment for the instant of its exec: the one we started is known, and a second
        # look finds what a worker was starting during the first.
        end_processes([*_own(handle.process), *processes_of(handle.job.name)], self.cluster.stop_grace_seconds)
        end_processes(processes_of(handle.job.name), LEFTOVER_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            handle.process.wait(10)

    def logs(self, handle: TorchrunHandle) -> list[str]:
        """The whole log so far, line by line."""
        return handle.job.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def _environment(self, name: str) -> Mapping[str, str]:
        threads = self.cluster.num_threads or max(1, (os.cpu_count() or 1) // self.cluster.processes)
        defaults = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        # torchrun would give its ranks 30 s to save, however long they were given.
        grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(self.cluster.stop_grace_seconds))}
        fixed = {JOB_VARIABLE: name, **TRAINER_ENVIRONMENT, **grace}
        return {**defaults, **os.environ, **fixed}


def _own(process: subprocess.Popen) -> list[psutil.Process]:
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            return [psutil.Process(process.pid)]
    return []
