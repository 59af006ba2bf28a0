"""What a TrainJob and its pods say about themselves, as kubectl gives them: JSON objects of Kubernetes."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from stages.trainjob import CONTAINER, CONTENT


def content_of(trainjob: Mapping[str, Any]) -> str | None:
    """What was asked for, as make_trainjob wrote it; None where somebody else made the job."""
    return trainjob["metadata"].get("annotations", {}).get(CONTENT)


def condition_of(trainjob: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The condition of a kind, if it is true; else empty."""
    conditions = trainjob.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), {})


def has_condition(trainjob: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition is true: Complete, Failed, Suspended."""
    return bool(condition_of(trainjob, kind))


def lives(trainjob: Mapping[str, Any]) -> bool:
    """Whether it waits or runs, and nobody has asked for its end."""
    ended = has_condition(trainjob, "Complete") or has_condition(trainjob, "Failed")
    return not ended and "deletionTimestamp" not in trainjob["metadata"]


def age_seconds(trainjob: Mapping[str, Any]) -> float:
    """Since it was made, by this machine's clock."""
    made = datetime.fromisoformat(trainjob["metadata"]["creationTimestamp"])
    return max(0.0, (datetime.now(UTC) - made).total_seconds())


def first_running(pods: list[dict[str, Any]]) -> str | None:
    """The pod of rank 0, once its container has started."""
    for pod in pods:
        metadata = pod["metadata"]
        names = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
        is_first = names.get("batch.kubernetes.io/job-completion-index") == "0"
        if is_first and any("waiting" not in state for state in _states(pod)):
            return metadata["name"]
    return None


def _states(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return [status["state"] for status in statuses if status["name"] == CONTAINER and status.get("state")]


def waits_of(trainjob: Mapping[str, Any], pods: list[dict[str, Any]]) -> list[str]:
    """What a person would like to know while nothing happens: no room, no image, suspended by a queue."""
    found = [f"suspended: {condition_of(trainjob, 'Suspended').get('message', '')}"]
    found = found if has_condition(trainjob, "Suspended") else []
    for pod in pods:
        name = pod["metadata"]["name"]
        for condition in pod.get("status", {}).get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                found.append(f"{name} waits: {condition.get('reason', '')} {condition.get('message', '')}")
        for state in _states(pod):
            if "waiting" in state:
                waiting = state["waiting"]
                found.append(f"{name} waits: {waiting.get('reason', '')} {waiting.get('message', '')}")
    return found


def failures_of(pods: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(pod, how it ended) of those that failed, the first first."""
    ends = [(pod["metadata"]["name"], s["terminated"]) for pod in pods for s in _states(pod) if "terminated" in s]
    failed = [(name, end) for name, end in ends if end.get("exitCode")]
    return sorted(failed, key=lambda item: item[1].get("finishedAt", ""))


def ends_of(pods: list[dict[str, Any]]) -> list[str]:
    """A line for each pod that failed or was taken away."""
    found = [f"{name} ended: {end.get('reason', 'Error')}, status {end['exitCode']}" for name, end in failures_of(pods)]
    reasons = [(pod["metadata"]["name"], pod.get("status", {})) for pod in pods]
    return found + [f"{name}: {s['reason']} {s.get('message', '')}" for name, s in reasons if s.get("reason")]


def reason_of(pods: list[dict[str, Any]]) -> str:
    """What the cluster did to a pod, where the exit status does not say it: out of memory, evicted."""
    killed = [(n, end["reason"]) for n, end in failures_of(pods) if end.get("reason") not in (None, "Error")]
    evicted = [(p["metadata"]["name"], p["status"]["reason"]) for p in pods if p.get("status", {}).get("reason")]
    return "; ".join(f"pod {name}: {reason}" for name, reason in [*killed, *evicted])


def exit_status_of(pods: list[dict[str, Any]]) -> int:
    """Of the container that failed first; 1 where no pod is left that says."""
    failed = failures_of(pods)
    return failed[0][1]["exitCode"] if failed else 1
