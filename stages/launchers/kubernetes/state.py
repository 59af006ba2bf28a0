"""The state of a TrainJob (a JSON object) and of its pods (V1Pod of the `kubernetes` package)."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from stages.launchers.kubernetes.trainjob import CONTAINER, CONTENT


def content_of(trainjob: Mapping[str, Any]) -> str | None:
    """Return the digest of the TrainJob's content that make_trainjob wrote; None for somebody else's job."""
    return trainjob["metadata"].get("annotations", {}).get(CONTENT)


def condition_of(trainjob: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of a kind (Complete, Failed, Suspended); empty unless its status is True."""
    conditions = trainjob.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), {})


def lives(trainjob: Mapping[str, Any]) -> bool:
    """Whether the TrainJob waits or runs, and nobody has deleted it."""
    ended = condition_of(trainjob, "Complete") or condition_of(trainjob, "Failed")
    return not ended and "deletionTimestamp" not in trainjob["metadata"]


def age_seconds(trainjob: Mapping[str, Any]) -> float:
    """Return the seconds since the TrainJob was created, by this machine's clock."""
    created = datetime.fromisoformat(trainjob["metadata"]["creationTimestamp"])
    return max(0.0, (datetime.now(UTC) - created).total_seconds())


def first_running(pods: list[Any]) -> str | None:
    """Return the name of rank 0's pod; None until its container has started."""
    for pod in pods:
        names = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
        is_first = names.get("batch.kubernetes.io/job-completion-index") == "0"
        if is_first and any(not state.waiting for state in _states(pod)):
            return pod.metadata.name
    return None


def _states(pod: Any) -> list[Any]:
    return [s.state for s in pod.status.container_statuses or [] if s.name == CONTAINER and s.state]


def waits_of(trainjob: Mapping[str, Any], pods: list[Any]) -> list[str]:
    """Return the reasons why the job does not start, in words: no free node, no image, suspended by a queue."""
    suspended = condition_of(trainjob, "Suspended")
    reasons = [f"suspended: {suspended.get('message', '')}"] if suspended else []
    for pod in pods:
        conditions = pod.status.conditions or []
        held = [c for c in conditions if c.type == "PodScheduled" and c.status == "False"]
        held += [state.waiting for state in _states(pod) if state.waiting]
        reasons += [f"{pod.metadata.name} waits: {why.reason or ''} {why.message or ''}" for why in held]
    return reasons


def failures_of(pods: list[Any]) -> list[tuple[str, Any]]:
    """Return (pod, V1ContainerStateTerminated of its container) of each failed pod, in order of time."""
    ends = [(pod.metadata.name, state.terminated) for pod in pods for state in _states(pod)]
    failed = [(name, end) for name, end in ends if end and end.exit_code]
    return sorted(failed, key=lambda item: (item[1].finished_at is not None, item[1].finished_at))


def ends_of(pods: list[Any]) -> list[str]:
    """Return one line per pod that failed or was evicted."""
    failed = [f"{name} ended: {end.reason or 'Error'}, status {end.exit_code}" for name, end in failures_of(pods)]
    evicted = [p for p in pods if p.status.reason]
    return failed + [f"{p.metadata.name}: {p.status.reason} {p.status.message or ''}" for p in evicted]


def reason_of(pods: list[Any]) -> str:
    """Return why the cluster ended pods, for reasons that exit statuses do not show: out of memory, evicted."""
    killed = [(name, end.reason) for name, end in failures_of(pods) if end.reason not in (None, "Error")]
    evicted = [(p.metadata.name, p.status.reason) for p in pods if p.status.reason]
    return "; ".join(f"pod {name}: {reason}" for name, reason in [*killed, *evicted])


def exit_status_of(pods: list[Any]) -> int:
    """Return the exit status of the container that failed first; 1 if no pod has one."""
    failed = failures_of(pods)
    return failed[0][1].exit_code if failed else 1
