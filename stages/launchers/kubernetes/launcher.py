"""The launcher for Kubernetes: a TrainJob of Kubeflow's Trainer, created and watched through the API server.

The pods and the flow's machine see the root at the same path, so run.json, metrics.jsonl and result.json are exchanged
through it. The cluster provides only the job's state and the log of its first pod. The job's name comes from the work,
and an annotation has a digest of its content. So the next try finds a job that a killed flow left behind, and continues
it if the content is the same, or ends it.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.launchers.config import ClusterConfig
from stages.launchers.job import EXIT_DEADLINE, TAIL_LINES, Handle, Job, JobFailed, timed_out
from stages.launchers.kubernetes.client import Cluster, ClusterError, LogFollower
from stages.launchers.kubernetes.state import (
    age_seconds,
    condition_of,
    content_of,
    ends_of,
    exit_status_of,
    failures_of,
    first_running,
    lives,
    reason_of,
    waits_of,
)
from stages.launchers.kubernetes.trainjob import (
    CONTAINER,
    LEFTOVER_SECONDS,
    make_trainjob,
    read_trainjob,
    render_trainjob,
)
from stages.launchers.rank_logs import remove_rank_logs

TRAINJOB_YAML = "trainjob.yaml"
LOOK_SECONDS = 5.0  # between two looks at the TrainJob
OUTAGE_SECONDS = 1800.0  # if a cluster does not answer for this time, the job counts as lost
SUBMIT_SECONDS = 60.0  # waiting time for a cluster that does not answer, before the job exists
DELETE_SECONDS = 60.0  # time for the cluster to remove an ended job
LOG_SECONDS = 10.0  # waiting time for the last lines of an ended job
EXIT_DELETED = 143
log = logging.getLogger("athanor.kubernetes")


@dataclass(slots=True, kw_only=True)
class KubernetesHandle(Handle):
    """A TrainJob. Times are from time.monotonic().

    Attributes:
        status: the exit status, after the job has ended.
        log: the log of the first pod, after its container has started.
        messages: the launcher's own messages that were already passed on.
    """

    name: str
    deadline: float
    next_look: float = 0.0
    last_answer: float = field(default_factory=time.monotonic)
    status: int | None = None
    log: LogFollower | None = None
    messages: set[str] = field(default_factory=set)


class KubernetesLauncher:
    """The launcher of TrainJobs. A TrainJob is never restarted; a new run resumes from the checkpoint."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.api = Cluster(read_trainjob(cluster)["metadata"]["namespace"])

    def check(self) -> None:
        """Check that the package `kubernetes` and a kubeconfig exist.

        Raises:
            InputError: one of them is missing.
        """
        self.api.connect()

    def plan(self, job: Job) -> str:
        """Return the manifest of `submit`, as YAML; needs no cluster."""
        return render_trainjob(make_trainjob(self.cluster, job))

    def submit(self, job: Job) -> KubernetesHandle:
        """Create the TrainJob, or continue a live one with the same content. Its manifest is stored next to run.json.

        Raises:
            InputError: the job file cannot be used, a path is in none of its volumes, the cluster cannot be reached, or
                it refuses the job.
        """
        manifest = make_trainjob(self.cluster, job)
        path = Path(job.arguments[-1]).parent / TRAINJOB_YAML
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, render_trainjob(manifest))
        try:
            self.api.connect()
        except InputError as error:
            raise InputError(f"{error}; or by hand: kubectl apply -f {path}") from error
        job.log_path.write_text("")
        handle = KubernetesHandle(
            job=job,
            command=["kubectl", "apply", "-f", str(path)],
            name=manifest["metadata"]["name"],
            deadline=time.monotonic() + self.cluster.timeout_seconds,
        )
        until = time.monotonic() + SUBMIT_SECONDS
        while True:
            try:
                self._attach_or_make(handle, manifest)
                return handle
            except ClusterError as error:
                if not error.is_passing or time.monotonic() > until:
                    raise InputError(f"{error}; the manifest is {path}") from error
                _say(handle, f"{error}; trying again")
                time.sleep(min(2.0, LOOK_SECONDS))

    def poll(self, handle: KubernetesHandle) -> int | None:
        """Return the exit status, None while the job waits or runs; pass on new lines of the first pod's log.

        Raises:
            JobFailed: the deadline has passed and the job was cancelled, somebody deleted the TrainJob, or the cluster
                has not answered for half an hour.
        """
        if handle.status is None and handle.log is not None:
            _log_lines(handle, handle.log.lines())
        if handle.status is not None or time.monotonic() < handle.next_look:
            return handle.status
        try:
            self._look(handle)
            handle.last_answer = time.monotonic()
        except ClusterError as error:
            self._tolerate_outage(handle, error)
        handle.next_look = time.monotonic() + LOOK_SECONDS
        if handle.status is None and time.monotonic() > handle.deadline:
            self.cancel(handle)
            raise timed_out(self.cluster, handle)
        return handle.status

    def cancel(self, handle: KubernetesHandle) -> None:
        """Delete the TrainJob: SIGTERM, time to save, SIGKILL. Does nothing to an ended job."""
        if handle.status is None:
            self._end(handle)
        if handle.log is not None:
            handle.log.close()

    def _attach_or_make(self, handle: KubernetesHandle, manifest: Mapping[str, Any]) -> None:
        trainjob = self.api.trainjob(handle.name)
        if trainjob is not None:
            if lives(trainjob) and content_of(trainjob) == content_of(manifest):
                handle.deadline -= age_seconds(trainjob)
                _say(handle, f"TrainJob {handle.name} lives; going on with it")
                return
            self._end(handle)
        remove_rank_logs(handle.job.log_path)
        self.api.make_trainjob(manifest)
        _say(handle, f"TrainJob {handle.name} made in namespace {self.api.namespace}")

    def _look(self, handle: KubernetesHandle) -> None:
        """Query the cluster once: the state, the first pod's log, and the reasons why pods wait."""
        trainjob = self.api.trainjob(handle.name)
        if trainjob is None or "deletionTimestamp" in trainjob["metadata"]:
            self._end(handle)
            handle.status = EXIT_DELETED
            raise JobFailed(f"somebody deleted TrainJob {handle.name}", handle, EXIT_DELETED)
        pods = self.api.pods(handle.name)
        if handle.log is None and (first := first_running(pods)):
            follow = partial(self.api.follow_log, first, CONTAINER)
            handle.log = LogFollower(follow, LOOK_SECONDS)
        for text in waits_of(trainjob, pods):
            _say(handle, text)
        if lives(trainjob):
            return
        if handle.log is not None:
            _log_lines(handle, handle.log.rest(LOG_SECONDS))
        if condition_of(trainjob, "Complete"):
            handle.status = 0
            return
        self._say_first_failure(handle, pods)
        for text in ends_of(pods):
            _say(handle, text)
        _say(handle, f"TrainJob {handle.name} failed: {condition_of(trainjob, 'Failed').get('message', '')}")
        handle.why = reason_of(pods)
        handle.status = exit_status_of(pods)
        if condition_of(trainjob, "Failed").get("reason") == "DeadlineExceeded":
            handle.status = EXIT_DEADLINE
            raise timed_out(self.cluster, handle)

    def _say_first_failure(self, handle: KubernetesHandle, pods: list[Any]) -> None:
        """Pass on the last lines of the pod that failed first, unless its log is the one that is followed."""
        failed = failures_of(pods)
        if failed and failed[0][0] != first_running(pods):
            _say(handle, f"{failed[0][0]} failed first; the end of its log:")
            _log_lines(handle, self.api.last_lines(failed[0][0], CONTAINER, TAIL_LINES))

    def _tolerate_outage(self, handle: KubernetesHandle, error: ClusterError) -> None:
        """Log that the cluster does not answer; the job continues. After OUTAGE_SECONDS, raise JobFailed."""
        _say(handle, f"{error}; the job goes on, asking again")
        silent = time.monotonic() - handle.last_answer
        if silent > OUTAGE_SECONDS:
            raise JobFailed(f"no answer about TrainJob {handle.name} for {silent:.0f} s: {error}", handle, 1) from error

    def _end(self, handle: KubernetesHandle) -> None:
        """Delete the TrainJob and wait until nothing of it is left; pass on new lines of its log meanwhile."""
        grace = self.cluster.stop_grace_seconds + LEFTOVER_SECONDS
        kill_at = time.monotonic() + grace + DELETE_SECONDS / 2
        give_up_at = time.monotonic() + grace + DELETE_SECONDS
        is_deleted = is_killed = False
        while time.monotonic() < give_up_at:
            try:
                if not is_deleted:
                    self.api.delete_trainjob(handle.name)
                    is_deleted = True
                if self.api.trainjob(handle.name) is None and not self.api.pods(handle.name):
                    break
                if time.monotonic() > kill_at and not is_killed:
                    self.api.kill_pods(handle.name)
                    is_killed = True
            except ClusterError as error:
                _say(handle, f"{error}; trying again to delete TrainJob {handle.name}")
            if handle.log is not None:
                _log_lines(handle, handle.log.lines())
            time.sleep(min(0.5, LOOK_SECONDS))
        else:
            text = f"not seen to end: kubectl delete trainjob {handle.name} -n {self.api.namespace}"
            _say(handle, text)
            log.error("%s", text)
        if handle.log is not None:
            _log_lines(handle, handle.log.rest(LOG_SECONDS))


def _log_lines(handle: KubernetesHandle, lines: list[str]) -> None:
    """Append lines to the job's log and pass them on."""
    if lines:
        with handle.job.log_path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        handle.pass_on(lines)


def _say(handle: KubernetesHandle, text: str) -> None:
    """Write a message of the launcher to the log, but each text only once."""
    if text not in handle.messages:
        handle.messages.add(text)
        _log_lines(handle, [f"kubernetes: {' '.join(text.split())}"])
