"""A job that a cluster starts when it has room: the half that the launchers of SLURM and Kubernetes share.

The flow and the nodes see the root at the same path, so run.json, metrics, result and logs are exchanged through it,
and the cluster is asked only for the state of the job. A job outlives a flow that is killed. The next try finds it in
the cluster, and waits for it if its content is the same; otherwise the job saves and ends before a new one is
submitted. The launcher's own messages go to `on_line` and not into the log, which the nodes write.
"""

import abc
import logging
import time
from dataclasses import dataclass, field
from typing import ClassVar

from dataset_builders.errors import InputError
from dataset_builders.storage.files import GrowingFile
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Handle, Job, JobFailed, remove_rank_logs, timed_out

LOOK_SECONDS = 5.0  # between two looks at the job
OUTAGE_SECONDS = 3600.0  # if the cluster does not answer for this time, the job counts as lost
SUBMIT_SECONDS = 120.0  # waiting time for a cluster that does not answer, before the job exists
CANCEL_SECONDS = 90.0  # time for the cluster to kill a job, after the time to save
log = logging.getLogger("athanor.cluster")


class ClusterError(RuntimeError):
    """The cluster did not answer or refused a request, so the state of the job is unknown.

    Attributes:
        is_passing: whether another try may help.
    """

    def __init__(self, text: str, is_passing: bool = True) -> None:
        super().__init__(text)
        self.is_passing = is_passing


@dataclass(slots=True, kw_only=True)
class ScheduledHandle(Handle):
    """A job in a cluster. Times are from time.monotonic().

    Attributes:
        title: the job in words, with its id.
        by_hand: the command by which a user ends the job.
        status: the exit status, after the job has ended.
        ran_seconds: the time that counts for the deadline.
        next_look, last_answer: times of the next question to the cluster, and of its last answer.
        is_told: whether the job was told to save and end.
        is_killed: whether the job was ended by force.
        message: the launcher's newest message.
    """

    log: GrowingFile
    title: str = ""
    by_hand: str = ""
    status: int | None = None
    ran_seconds: float = 0.0
    next_look: float = 0.0
    last_answer: float = field(default_factory=time.monotonic)
    is_told: bool = False
    is_killed: bool = False
    message: str = ""


class ScheduledLauncher(abc.ABC):
    """The launcher of jobs that a cluster schedules. A subclass asks its cluster, and raises ClusterError if it gets no
    answer."""

    unreachable: ClassVar[str]  # the error of a submit without an answer, with the cluster's {error} and the way out
    late_seconds: ClassVar[float] = 0.0  # time that the cluster itself takes to end a job, after the time to save

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    @abc.abstractmethod
    def _prepare(self, job: Job) -> ScheduledHandle:
        """Check that the job can be submitted, and return its handle."""

    @abc.abstractmethod
    def _attach_or_make(self, handle: ScheduledHandle) -> None:
        """Find the living job of an earlier try and keep it, or end it; make a job if none is left."""

    @abc.abstractmethod
    def _look(self, handle: ScheduledHandle) -> None:
        """Ask for the job's state once: report it, and set the exit status of an ended job."""

    @abc.abstractmethod
    def _end(self, handle: ScheduledHandle, is_late: bool) -> None:
        """Take the next step to end the job: let it save, or kill it if that `is_late`. Set the exit status of an ended
        job."""

    def submit(self, job: Job) -> ScheduledHandle:
        """Submit the job, or wait for a living job with the same content.

        Raises:
            InputError: the job file cannot be used, or the cluster cannot be reached or refuses the job.
        """
        handle = self._prepare(job)
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + SUBMIT_SECONDS
        while True:
            try:
                self._attach_or_make(handle)
                return handle
            except ClusterError as error:
                if not error.is_passing or time.monotonic() > until:
                    raise InputError(self.unreachable.format(error=error, command=handle.command[-1])) from error
                self._say(handle, f"{error}; trying again")
                time.sleep(min(1.0, LOOK_SECONDS))

    def poll(self, handle: ScheduledHandle) -> int | None:
        """Return the exit status, None while the job waits or runs; pass on new lines of the log.

        Raises:
            JobFailed: the job took longer than its deadline and was cancelled, somebody deleted it, or the cluster has
                not answered for an hour.
        """
        handle.pass_on_new(handle.log)
        if handle.status is not None or time.monotonic() < handle.next_look:
            return handle.status
        handle.next_look = time.monotonic() + LOOK_SECONDS
        try:
            self._look(handle)
            handle.last_answer = time.monotonic()
        except ClusterError as error:
            self._say(handle, f"{error}; the job goes on, asking again")
            silent = time.monotonic() - handle.last_answer
            if silent > OUTAGE_SECONDS:
                what = f"no answer about {handle.title} for {silent:.0f} s: {error}; run again to go on waiting for it"
                raise JobFailed(what, handle, 1) from error
        if handle.status is None and handle.ran_seconds > self.cluster.timeout_seconds:
            self.cancel(handle)
            raise timed_out(self.cluster, handle)
        handle.pass_on_new(handle.log)
        return handle.status

    def cancel(self, handle: ScheduledHandle) -> None:
        """Let the ranks save, then end the job and wait for its end. Does nothing to an ended job."""
        late_at = time.monotonic() + self.cluster.stop_grace_seconds + self.late_seconds
        while handle.status is None and time.monotonic() < late_at + CANCEL_SECONDS:
            try:
                self._end(handle, time.monotonic() > late_at)
            except ClusterError as error:
                self._say(handle, f"{error}; trying again to cancel {handle.title}")
            handle.pass_on_new(handle.log)
            if handle.status is None:
                time.sleep(min(0.5, LOOK_SECONDS))
        if handle.status is None:
            log.error("%s was not seen to end; end it with: %s", handle.title, handle.by_hand)

    def _clear(self, handle: ScheduledHandle) -> None:
        """Forget the job of an earlier try: its end and its logs."""
        handle.status, handle.is_told, handle.is_killed = None, False, False
        handle.lines.clear()
        remove_rank_logs(handle.job.log_path)
        handle.job.log_path.write_text("")
        handle.log = GrowingFile(handle.job.log_path)

    def _say(self, handle: ScheduledHandle, text: str) -> None:
        """Pass on a message of the launcher, unless it equals the last one."""
        if text != handle.message:
            handle.message = text
            log.info("%s", text)
            handle.job.on_line(f"{self.cluster.launcher}: {' '.join(text.split())}")
