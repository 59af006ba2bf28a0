"""A TrainJob of Kubeflow's Trainer, made and watched with kubectl.

The pods and the machine of the flow see the root at the same path, so run.json, metrics.jsonl and result.json go
through it; the cluster is asked only how the job is and for the log of its first pod. The job's name comes from the
work, and what it was asked is written on it: the next try finds a job that a killed flow left behind, and goes on
with it where it is the same, or ends it.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_text
from stages.cluster_config import ClusterConfig
from stages.kubectl import Kubectl, KubectlError, LogStream
from stages.launch import EXIT_DEADLINE, TAIL_LINES, Handle, Job, JobFailed
from stages.rank_logs import remove_rank_logs
from stages.trainjob import CONTAINER, LEFTOVER_SECONDS, check_cluster, make_trainjob, render_trainjob
from stages.trainjob_state import (
    age_seconds,
    condition_of,
    content_of,
    ends_of,
    exit_status_of,
    failures_of,
    first_running,
    has_condition,
    lives,
    reason_of,
    waits_of,
)

TRAINJOB_YAML = "trainjob.yaml"
OUTAGE_SECONDS = 1800.0  # a cluster that has not answered for so long has lost the job, as far as we know
SUBMIT_SECONDS = 60.0  # to wait for a cluster that does not answer, before anything is there
DELETE_SECONDS = 60.0  # for the cluster to remove what has ended
LOG_SECONDS = 10.0  # for the last lines of an ended job
EXIT_DELETED = 143
log = logging.getLogger("athanor.kubernetes")


@dataclass(slots=True, kw_only=True)
class KubernetesHandle(Handle):
    """A TrainJob. `status` is its exit status once it has ended; times are of time.monotonic()."""

    name: str
    deadline: float
    next_look: float = 0.0
    last_answer: float = field(default_factory=time.monotonic)
    status: int | None = None
    stream: LogStream | None = None
    said: set[str] = field(default_factory=set)


class KubernetesLauncher:
    """A TrainJob, never restarted: a failed run goes on from its checkpoint when run again."""

    def __init__(self, cluster: ClusterConfig) -> None:
        check_cluster(cluster)
        self.cluster = cluster
        self.kubectl = Kubectl(cluster.kubernetes)

    def check(self) -> None:
        """See that there is a kubectl."""
        self.kubectl.check_installed()

    def plan(self, job: Job) -> str:
        """The manifest that `submit` would apply, as YAML."""
        return render_trainjob(make_trainjob(self.cluster, job))

    def submit(self, job: Job) -> KubernetesHandle:
        """Apply the manifest, which is kept beside run.json; or go on with a living job that has the same.

        Raises:
            InputError: there is no kubectl, a path is outside of the claim, or the cluster refuses.
        """
        manifest = make_trainjob(self.cluster, job)
        path = Path(job.arguments[-1]).parent / TRAINJOB_YAML
        job.log_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, render_trainjob(manifest))
        self.kubectl.check_installed(path)
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
                self._attach_or_make(handle, manifest, path)
                return handle
            except KubectlError as error:
                if not error.is_passing or time.monotonic() > until:
                    raise InputError(f"{error}; the manifest is {path}") from error
                _say(handle, f"{error}; trying again")
                time.sleep(min(2.0, self.cluster.kubernetes.poll_seconds))

    def poll(self, handle: KubernetesHandle) -> int | None:
        """None while it waits or runs; hands new lines of the first pod's log to `on_line`.

        Raises:
            JobFailed: the deadline has passed (the job is cancelled before), somebody deleted the TrainJob, or the
                cluster has not answered for half an hour.
        """
        if handle.status is None and handle.stream is not None:
            _hand_on(handle, handle.stream.lines())
        if handle.status is not None or time.monotonic() < handle.next_look:
            return handle.status
        try:
            self._look(handle)
            handle.last_answer = time.monotonic()
        except KubectlError as error:
            self._bear(handle, error)
        handle.next_look = time.monotonic() + self.cluster.kubernetes.poll_seconds
        if handle.status is None and time.monotonic() > handle.deadline:
            self.cancel(handle)
            raise self._too_long(handle)
        return handle.status

    def cancel(self, handle: KubernetesHandle) -> None:
        """Delete the TrainJob: SIGTERM, time to save, SIGKILL. Does nothing to an ended job."""
        if handle.status is None:
            self._end(handle)
        if handle.stream is not None:
            handle.stream.close()

    def logs(self, handle: KubernetesHandle) -> list[str]:
        """The first pod's log so far, with what the launcher said, line by line."""
        return handle.job.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def _attach_or_make(self, handle: KubernetesHandle, manifest: Mapping[str, Any], path: Path) -> None:
        found = self.kubectl.trainjob(handle.name)
        if found is not None:
            if lives(found) and content_of(found) == content_of(manifest):
                handle.deadline -= age_seconds(found)
                _say(handle, f"TrainJob {handle.name} lives; going on with it")
                return
            self._end(handle)
        remove_rank_logs(handle.job.log_path)
        self.kubectl.apply(path)
        _say(handle, f"TrainJob {handle.name} made in namespace {self.cluster.kubernetes.namespace}")

    def _look(self, handle: KubernetesHandle) -> None:
        """One look at the cluster: the state, the first pod's log, and what a pod waits for."""
        found = self.kubectl.trainjob(handle.name)
        if found is None or "deletionTimestamp" in found["metadata"]:
            self._end(handle)
            handle.status = EXIT_DELETED
            raise JobFailed(f"somebody deleted TrainJob {handle.name}", handle, EXIT_DELETED)
        pods = self.kubectl.pods(handle.name)
        if handle.stream is None and (first := first_running(pods)):
            handle.stream = LogStream(self.kubectl, first, CONTAINER, self.cluster.kubernetes.poll_seconds)
        for text in waits_of(found, pods):
            _say(handle, text)
        if lives(found):
            return
        if handle.stream is not None:
            _hand_on(handle, handle.stream.rest(LOG_SECONDS))
        if has_condition(found, "Complete"):
            handle.status = 0
            return
        self._tell_first_failure(handle, pods)
        for text in ends_of(pods):
            _say(handle, text)
        _say(handle, f"TrainJob {handle.name} failed: {condition_of(found, 'Failed').get('message', '')}")
        handle.why = reason_of(pods)
        handle.status = exit_status_of(pods)
        if condition_of(found, "Failed").get("reason") == "DeadlineExceeded":
            handle.status = EXIT_DEADLINE
            raise self._too_long(handle)

    def _tell_first_failure(self, handle: KubernetesHandle, pods: list[dict[str, Any]]) -> None:
        """The last lines of the pod that failed first, where it is another than the one whose log is followed."""
        failed = failures_of(pods)
        if failed and failed[0][0] != first_running(pods):
            _say(handle, f"{failed[0][0]} failed first; the end of its log:")
            _hand_on(handle, self.kubectl.last_lines(failed[0][0], CONTAINER, TAIL_LINES))

    def _bear(self, handle: KubernetesHandle, error: KubectlError) -> None:
        """A cluster that does not answer is no end of the job, for a while."""
        _say(handle, f"{error}; the job goes on, asking again")
        silent = time.monotonic() - handle.last_answer
        if silent > OUTAGE_SECONDS:
            raise JobFailed(f"no answer about TrainJob {handle.name} for {silent:.0f} s: {error}", handle, 1) from error

    def _end(self, handle: KubernetesHandle) -> None:
        """Delete and wait until nothing is left; the log goes on meanwhile."""
        grace = self.cluster.stop_grace_seconds + LEFTOVER_SECONDS
        kill_at = time.monotonic() + grace + DELETE_SECONDS / 2
        give_up_at = time.monotonic() + grace + DELETE_SECONDS
        asked = killed = False
        while time.monotonic() < give_up_at:
            try:
                if not asked:
                    self.kubectl.delete_trainjob(handle.name)
                    asked = True
                if self.kubectl.trainjob(handle.name) is None and not self.kubectl.pods(handle.name):
                    break
                if time.monotonic() > kill_at and not killed:
                    self.kubectl.kill_pods(handle.name)
                    killed = True
            except KubectlError as error:
                _say(handle, f"{error}; trying again to delete TrainJob {handle.name}")
            if handle.stream is not None:
                _hand_on(handle, handle.stream.lines())
            time.sleep(min(0.5, self.cluster.kubernetes.poll_seconds))
        else:
            text = f"not seen to end: kubectl delete trainjob {handle.name} -n {self.cluster.kubernetes.namespace}"
            _say(handle, text)
            log.error("%s", text)
        if handle.stream is not None:
            _hand_on(handle, handle.stream.drain(LOG_SECONDS))

    def _too_long(self, handle: KubernetesHandle) -> JobFailed:
        return JobFailed(f"stopped after timeout_seconds={self.cluster.timeout_seconds:g}", handle, EXIT_DEADLINE)


def _hand_on(handle: KubernetesHandle, lines: list[str]) -> None:
    if not lines:
        return
    with handle.job.log_path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    for line in lines:
        handle.lines.append(line)
        handle.job.on_line(line)


def _say(handle: KubernetesHandle, text: str) -> None:
    """A line of the launcher's own in the log, once."""
    if text not in handle.said:
        handle.said.add(text)
        _hand_on(handle, [f"kubernetes: {' '.join(text.split())}"])
