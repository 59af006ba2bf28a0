"""The launcher for this host: several processes with torchrun; one process without it, which starts 1.5 to 4 s earlier.

A job's processes have its name in their environment, because torchrun gives every worker a session of its own: killing
torchrun's process group would leave the workers. The name also finds processes whose parent was killed.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from dataset_builders.storage.files import GrowingFile, moved_log, trim_log
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Handle, Job, as_rank, rank_environment, remove_rank_logs, timed_out
from stages.shared.launchers.parent import with_parent
from stages.shared.launchers.processes import LEFTOVER_SECONDS, end_processes, processes_of

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@dataclass(slots=True, kw_only=True)
class TorchrunHandle(Handle):
    """A job on this host."""

    process: subprocess.Popen
    deadline: float
    log: GrowingFile


class TorchrunLauncher:
    """The launcher of processes on this host. Nothing is restarted; a new run resumes from the checkpoint."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    def check(self) -> None:
        """Check nothing: torchrun comes with torch."""

    def command(self, job: Job) -> list[str]:
        if self.cluster.processes == 1:
            return [sys.executable, *job.arguments]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", "--no-python"]
        rank = as_rank(job.log_path.parent, [sys.executable, *job.arguments])
        return [sys.executable, *torchrun, f"--nproc-per-node={self.cluster.processes}", *rank]

    def plan(self, job: Job) -> str:
        """Return the command line that `submit` would run."""
        return shlex.join(self.command(job))

    def submit(self, job: Job) -> TorchrunHandle:
        """Start the job. All its output goes to the log file, which is truncated first."""
        end_processes(processes_of(job.name), self.cluster.stop_grace_seconds)
        command = self.command(job)
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        remove_rank_logs(job.log_path)
        job.log_path.write_bytes(b"")
        # A file, not a pipe: a job blocks on a pipe if its parent does not read. Opened to append, see `trim_log`.
        with job.log_path.open("ab") as log:
            process = subprocess.Popen(
                with_parent(command),  # a flow that is killed lets its job save and end
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(job.name),
                start_new_session=True,
            )
        deadline = time.monotonic() + self.cluster.timeout_seconds
        return TorchrunHandle(
            job=job, command=command, process=process, deadline=deadline, log=GrowingFile(job.log_path)
        )

    def poll(self, handle: TorchrunHandle) -> int | None:
        """Return the exit status, None while the job runs; pass on new lines of the log, and shorten long logs.

        Raises:
            JobFailed: the deadline has passed, and the job was cancelled.
        """
        status = handle.process.poll()
        handle.pass_on_new(handle.log)
        for path in handle.job.log_path.parent.glob("*.log"):
            if trim_log(path) and path == handle.job.log_path:
                handle.pass_on_new(GrowingFile(moved_log(path), handle.log.taken))  # what came before the cut
                handle.log.taken = 0  # it may have as many bytes again before the next poll
        if status is None and time.monotonic() > handle.deadline:
            self.cancel(handle)
            raise timed_out(self.cluster, handle)
        return status

    def cancel(self, handle: TorchrunHandle) -> None:
        """Send SIGTERM to the workers, wait for them to save, then SIGKILL the rest. Does nothing to an ended job."""
        # During its exec, a process shows no environment for an instant. So the process that we started is added, and a
        # second search finds processes that a worker was starting during the first.
        own = []
        if handle.process.poll() is None:
            with contextlib.suppress(psutil.Error):
                own = [psutil.Process(handle.process.pid)]
        end_processes([*own, *processes_of(handle.job.name)], self.cluster.stop_grace_seconds)
        end_processes(processes_of(handle.job.name), LEFTOVER_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            handle.process.wait(10)

    def _environment(self, name: str) -> Mapping[str, str]:
        threads = self.cluster.num_threads or max(1, (os.cpu_count() or 1) // self.cluster.processes)
        defaults = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        own = {**defaults, **os.environ, **rank_environment(self.cluster, name)}
        if self.cluster.processes > 1:
            return own
        # If the flow itself runs in a job of several processes, that job's variables must not reach this process.
        return {name: value for name, value in own.items() if name not in ("MASTER_ADDR", "MASTER_PORT")} | _ALONE
