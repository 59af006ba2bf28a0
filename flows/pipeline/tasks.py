"""The Prefect task that runs a stage, and the Prefect task that registers the model.

Prefect adds retries, logs and the UI. The manifest decides whether a stage is finished. Only paths and plain values are
passed to a task. No task uses Prefect's timeout, which can neither interrupt a thread nor end a child process; the
launcher enforces the trainer's deadline. Only errors that may be temporary are retried.

Cancelling a flow run sends SIGTERM to its process, and Prefect raises an exception for it in the task. The launcher
then gives the trainer time to save, and ends it.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, local_dir, location
from flows.pipeline.config import PipelineConfig
from flows.pipeline.graph import ArtifactRef, Needs, Node, open_place
from flows.pipeline.progress import display, show_rows
from flows.pipeline.trainer_log import log_lines
from flows.resources.dask_pool import with_cluster
from flows.resources.limits import slot_of, wait_for_server
from flows.resources.run_record import record_run
from flows.tracking.config import refusals
from flows.tracking.tracker import Tracker
from stages.artifacts.artifact import Artifact, Input, StageResult, artifact_dir, stage_identity
from stages.artifacts.quarantine import reason_words
from stages.artifacts.run_stage import run_stage, scratch_dir
from stages.artifacts.workers import StageResources
from stages.release.hub import push_to_hub
from stages.scoring.names import OVERALL, SAME_ANSWERS, flat_scores
from trainer.contract.answer import MetricsRow
from trainer.contract.names import HF_EXPORT, METRICS_JSONL

_LOG_SECONDS = 10.0


class StageRun(TypedDict):
    """The result of a stage's task: the directory of its artifact, and its duration."""

    stage: str
    dir: str
    reused: bool
    seconds: float


class StoppedBeside(RuntimeError):
    """A stage was stopped because a stage that ran beside it failed, or because the run was cancelled."""


def _may_pass(_task: object, _task_run: object, state: Any) -> bool:
    """Whether a second try may succeed, as after an error of a network file system. An error that the user must fix is
    not retried."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError) and not isinstance(error, InputError)


_POLICY: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": 1,
    "retry_delay_seconds": 10,
    "retry_condition_fn": _may_pass,
    "persist_result": False,
}


@task(task_run_name="{node.name}", **_POLICY)
def stage_task(
    config: PipelineConfig,
    root: str,
    tracking_run: str | None,
    node: Node,
    places: Mapping[str, ArtifactRef],
    stop: threading.Event | None = None,
) -> StageRun:
    """Make or reuse the artifact of a node, and publish it to MLflow.

    Args:
        places: role -> place of the input.
        stop: when it is set, the work ends with an error at its next progress.
    """
    inputs = {role: open_place(place, role) for role, place in places.items()}
    tracker = Tracker(location(root), tracking_run)
    record_run(location(root), tracking_run)
    stage = node.load()
    identity = stage_identity(stage, node.config, inputs)
    is_finished = (artifact_dir(location(root), stage, identity) / MANIFEST).is_file()
    work_dir = scratch_dir(location(root), stage, identity)
    with _resources(node, config, inputs, tracker, work_dir, stop or threading.Event()) as resources:
        needs_slot = Needs.SLOT in node.needs and not is_finished
        with slot_of(resources.cluster.limit, location(root)) if needs_slot else contextlib.nullcontext():
            display().started(node.name)
            result = run_stage(stage, node.config, inputs, location(root), resources)
        wait_for_server()
        _report(node.name, result)
    tracker.log_stage(result.artifact, node.name, stage.dataset)
    directory, seconds = str(result.artifact.dir), round(result.seconds, 2)
    return StageRun(stage=node.name, dir=directory, reused=result.reused, seconds=seconds)


def _report(name: str, result: StageResult) -> None:
    """Show and log how a stage ended."""
    display().ended(name, result.reused, result.seconds)
    how = "reused" if result.reused else f"made in {result.seconds:.1f} s:"
    skips = result.artifact.manifest.skips
    left_out = f"; left out: {reason_words(skips)}" if skips else ""
    get_run_logger().info("%s %s %s%s", name, how, result.artifact.dir, left_out)


@contextlib.contextmanager
def _resources(
    node: Node,
    config: PipelineConfig,
    inputs: Mapping[str, Input],
    tracker: Tracker,
    work_dir: StorePath,
    stop: threading.Event,
) -> Iterator[StageResources]:
    """Provide the stage's workers and listeners while the block lasts.

    Args:
        work_dir: work directory of the stage, in which a trainer writes its metrics.
    """
    execution, logger, is_due = config.execution, get_run_logger(), _every(_LOG_SECONDS)

    def on_progress(finished: int, total: int) -> None:
        if stop.is_set():
            raise StoppedBeside(f"{node.name} was stopped, since a stage beside it ended the run")
        display().progressed(node.name, finished, total)
        if finished < total and is_due():
            logger.info("%s: %s of %s", node.name, f"{finished:,}", f"{total:,}")

    resources = StageResources(
        num_workers=execution.num_workers or os.cpu_count() or 1,
        cluster=execution.cluster,
        trainer=execution.trainer,
        on_progress=on_progress,
        on_line=log_lines(),
    )
    with contextlib.ExitStack() as stack:
        if Needs.WORKERS in node.needs:
            resources = stack.enter_context(with_cluster(resources, execution))
        if Needs.METRICS in node.needs:
            stack.enter_context(tracker.follow(work_dir / METRICS_JSONL))
            num_bins = inputs["bins"].manifest.stats["num_bins"]["train"]
            train = config.train.for_bins(num_bins)
            resources = dataclasses.replace(resources, on_rows=_listener(node.name, train.num_steps))
        yield resources


def _listener(name: str, num_steps: int) -> Callable[[list[MetricsRow]], None]:
    """Return a listener that passes rows to the display, and the newest row to the Prefect log every _LOG_SECONDS."""
    logger, is_due = get_run_logger(), _every(_LOG_SECONDS)

    def on_rows(rows: list[MetricsRow]) -> None:
        text = show_rows(name, rows, num_steps)
        if is_due():
            logger.info("%s: step %s of %s: %s", name, f"{rows[-1].step:,}", f"{num_steps:,}", text)

    return on_rows


def _every(seconds: float) -> Callable[[], bool]:
    """Return a function that returns True at its first call, and then at most once in a number of seconds."""
    next_at = time.monotonic()

    def is_due() -> bool:
        nonlocal next_at
        if (now := time.monotonic()) < next_at:
            return False
        next_at = now + seconds
        return True

    return is_due


@task(name="register", **_POLICY)
def register_task(config: PipelineConfig, root: str, tracking_run: str | None, dirs: Mapping[str, str]) -> list[str]:
    """Log the model and its scores in MLflow. If the scores pass the gates, register the model and push it to the
    repository that the recipe names.

    Args:
        dirs: stage -> directory, for "export", "evaluate", "release" and, if the recipe has them, "compare" and
            "reload".

    Returns:
        one line per gate that failed; empty if the model was registered.
    """
    artifacts = {stage: Artifact.load(location(directory)) for stage, directory in dirs.items()}
    tracker, registry = Tracker(location(root), tracking_run), config.execution.registry
    scores, why = artifacts["evaluate"].manifest.stats["scores"], {}
    if "reload" in artifacts:
        reloaded = artifacts["reload"].manifest.stats
        scores = {**scores, OVERALL: {**scores[OVERALL], SAME_ANSWERS: reloaded[SAME_ANSWERS]}}
        why = {SAME_ANSWERS: reloaded["reason"]}
    gains = artifacts["compare"].manifest.stats["gains"] if "compare" in artifacts else None
    failed_gates = refusals(registry.gates, flat_scores(scores), gains, why)
    for reason in failed_gates:
        get_run_logger().warning("the model is not registered: %s", reason)
    name, hf_dir = config.mlflow_name, artifacts["release"].dir / HF_EXPORT
    tracker.register(artifacts["export"], artifacts["evaluate"], hf_dir, name, failed_gates, scores)
    if registry.push_to is not None and not failed_gates:
        page = push_to_hub(local_dir(hf_dir), registry.push_to, registry.push_private)
        get_run_logger().info("the model is at %s", page)
    return failed_gates
