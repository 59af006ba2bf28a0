"""The Prefect task that runs a stage, and the Prefect task that registers the model.

Prefect adds retries, logs and the UI. The manifest decides whether a stage is finished. No task uses Prefect's timeout,
which can neither interrupt a thread nor end a child process; the launcher enforces the trainer's deadline. Only errors
that may be temporary are retried.

A flow run that is cancelled or suspended gets SIGTERM (`prefect_changes.py`), and Prefect raises an exception for it in
the task. The launcher then gives the trainer time to save, and ends it.
"""

import contextlib
import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import StateType
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, State

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, local_dir
from flows.pipeline.config import PipelineConfig
from flows.pipeline.dask_pool import with_cluster
from flows.pipeline.limits import slot_of, wait_for_server
from flows.pipeline.plan import Plan
from flows.pipeline.prefect_changes import asked_to_stop
from flows.pipeline.progress import display, show_rows
from flows.pipeline.run_record import record_run, record_saved
from flows.pipeline.steps import Needs, Step
from flows.tracking.config import refusals
from flows.tracking.tracker import Tracker
from stages.release.hub import push_to_hub
from stages.shared.artifacts.artifact import Input, artifact_dir, stage_identity
from stages.shared.artifacts.left_out import reason_words
from stages.shared.artifacts.run_stage import run_stage, scratch_dir
from stages.shared.artifacts.workers import StageResources
from stages.shared.scoring.names import OVERALL, SAME_ANSWERS, flat_scores
from trainer.contract.names import HF_EXPORT, METRICS_JSONL, RESULT_JSON
from trainer.contract.result import MetricsRow, TrainResult

_LOG_SECONDS = 10.0

BURST_LINES = 100
LINES_A_SECOND = 2.0
_MAX_CHARACTERS = 2000
_ERROR = re.compile(r"^\s*Traceback|\b\w+(Error|Exception)\b:|\bERROR\b|\bCRITICAL\b")
_WARNING = re.compile(r"\bWARN(ING)?\b")
_STEP = re.compile(r"^[\d:]+ step \d+ loss ")
_OF_LIBRARIES = re.compile(r":\d+: \w*Warning: ")  # the next line, which is indented, is the line of code


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


@task(task_run_name="{name}", **_POLICY)
def stage_task(plan: Plan, name: str, tracking_run: str | None, stop: threading.Event | None = None) -> State | None:
    """Make or reuse the artifact of a step, and publish it to MLflow.

    Args:
        name: name of the step.
        stop: when it is set, the work ends with an error at its next progress.

    Returns:
        the task's own state, Cancelled, if a person has cancelled or suspended the run; else None.
    """
    step = plan.step(name)
    try:
        _run_step(plan, step, tracking_run, stop or threading.Event())
    except (TerminationSignal, KeyboardInterrupt) as error:
        if saved := saved_line(plan.root, step):
            get_run_logger().info("%s: %s", name, saved)
            error.add_note(saved)  # for the command line, which no line of Prefect's log reaches
        asked = asked_to_stop() if isinstance(error, TerminationSignal) else None
        if asked is None:
            raise
        if asked.type == StateType.CANCELLING:
            record_saved(plan.root, str(flow_run.root_flow_run_id), saved)
        return Cancelled(message=saved or "stopped; finished parts are kept")
    return None


def _run_step(plan: Plan, step: Step, tracking_run: str | None, stop: threading.Event) -> None:
    stage, name, inputs, tracker = step.stage, step.name, step.read(), Tracker(plan.root, tracking_run)
    record_run(plan.root, tracking_run)
    identity = stage_identity(stage, step.config, inputs)
    is_finished = (artifact_dir(plan.root, stage, identity) / MANIFEST).is_file()
    work_dir = scratch_dir(plan.root, stage, identity)
    with _resources(step, plan.config, inputs, tracker, work_dir, stop) as resources:
        needs_slot = Needs.SLOT in step.needs and not is_finished
        with slot_of(resources.cluster.limit, plan.root) if needs_slot else contextlib.nullcontext():
            display().started(name)
            step.result = run_stage(stage, step.config, inputs, plan.root, resources)
        wait_for_server()
        result = step.result
        display().ended(name, result.reused, result.seconds)
        how = "reused" if result.reused else f"made in {result.seconds:.1f} s:"
        skips = result.artifact.manifest.skips
        left_out = f"; left out: {reason_words(skips)}" if skips else ""
        get_run_logger().info("%s %s %s%s", name, how, result.artifact.dir, left_out)
    step.artifact = step.result.artifact
    tracker.log_stage(step.artifact, name, stage.dataset)


def saved_line(root: StorePath, step: Step) -> str:
    """Return `step 215 saved` if the training of a pipeline's step was stopped after its step 215; empty if the work of
    the pipeline's step is no training, or has no checkpoint."""
    work_dir = scratch_dir(root, step.stage, stage_identity(step.stage, step.config, step.read()))
    with contextlib.suppress(OSError, ValueError):
        result = TrainResult.model_validate_json((work_dir / RESULT_JSON).read_bytes())
        if result.status == "stopped" and result.checkpoint is not None:
            return f"step {result.step} saved"
    return ""


def stage_runs(plan: Plan) -> list[StageRun]:
    """Return how each step that this run has made or reused came by its artifact, in the order of the plan."""
    done = [(step.name, step.result) for step in plan.steps if step.result is not None]
    return [
        StageRun(stage=name, dir=str(result.artifact.dir), reused=result.reused, seconds=round(result.seconds, 2))
        for name, result in done
    ]


@task(name="register", **_POLICY)
def register_task(plan: Plan, tracking_run: str | None) -> list[str]:
    """Log the model and its scores in MLflow. If the scores pass the gates, register the model and push it to the
    repository that the recipe names.

    Returns:
        one line per gate that failed; empty if the model was registered.
    """
    tracker, registry = Tracker(plan.root, tracking_run), plan.config.execution.registry
    evaluated, verified, compared = (plan.artifact(name) for name in ("evaluate", "verify", "compare"))
    scores, why = evaluated.manifest.stats["scores"], {}
    if verified is not None:
        stats = verified.manifest.stats
        scores = {**scores, OVERALL: {**scores[OVERALL], SAME_ANSWERS: stats[SAME_ANSWERS]}}
        why = {SAME_ANSWERS: stats["reason"]}
    gains = None if compared is None else compared.manifest.stats["gains"]
    failed_gates = refusals(registry.gates, flat_scores(scores), gains, why)
    for reason in failed_gates:
        get_run_logger().warning("the model is not registered: %s", reason)
    hf_dir = plan.artifact("release").dir / HF_EXPORT
    tracker.register(plan.artifact("export"), evaluated, hf_dir, plan.config.mlflow_name, failed_gates, scores)
    if registry.push_to is not None and not failed_gates:
        page = push_to_hub(local_dir(hf_dir), registry.push_to, registry.push_private)
        get_run_logger().info("the model is at %s", page)
    return failed_gates


def log_lines(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Return a listener that writes a trainer's lines (those of rank 0) to the current run's log, each with its level.

    All lines are in the file logs/trainer.log of the training. Prefect gets only as many per second as its server can
    take, no line of each step (`_resources` writes a row every ten seconds), and no warning that a library gives to
    programmers.

    The listener writes up to BURST_LINES at once and then LINES_A_SECOND, and counts the lines that it drops. Errors
    have a share of their own, of the same size, so that other lines never displace them.

    Returns:
        a function of one line, which raises nothing.
    """
    logger = get_run_logger()
    shares = {logging.ERROR: _Share(clock), logging.INFO: _Share(clock)}

    is_code = False

    def log_line(line: str) -> None:
        nonlocal is_code
        was_warned, is_code = is_code, bool(_OF_LIBRARIES.search(line))
        if not line.strip() or is_code or (was_warned and line[0].isspace()) or _STEP.match(line):
            return
        level = logging.WARNING if _WARNING.search(line) else logging.INFO
        if _ERROR.search(line):
            level = logging.ERROR
        share = shares[logging.ERROR if level == logging.ERROR else logging.INFO]
        if not share.takes():
            return
        if share.num_dropped:
            logger.info("(%d lines of the trainer left out here; all are in its log file)", share.num_dropped)
            share.num_dropped = 0
        logger.log(level, "trainer: %s", line.rstrip()[:_MAX_CHARACTERS])

    return log_line


@contextlib.contextmanager
def _resources(
    step: Step,
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
    execution, logger = config.execution, get_run_logger()
    is_due = _every(_LOG_SECONDS)  # Prefect's log gets one line of progress, and one row of metrics, in that time

    def on_progress(finished: int, total: int) -> None:
        if stop.is_set():
            raise StoppedBeside(f"{step.name} was stopped, since a stage beside it ended the run")
        display().progressed(step.name, finished, total)
        if finished < total and is_due():
            logger.info("%s: %s of %s", step.name, f"{finished:,}", f"{total:,}")

    resources = StageResources(
        num_workers=execution.num_workers or os.cpu_count() or 1,
        cluster=execution.cluster,
        trainer=execution.trainer,
        on_progress=on_progress,
        on_line=log_lines(),
    )
    with contextlib.ExitStack() as stack:
        if Needs.WORKERS in step.needs:
            resources = stack.enter_context(with_cluster(resources, execution))
        if Needs.METRICS in step.needs:
            num_steps = config.train.for_bins(inputs["bins"].manifest.stats["num_bins"]["train"]).num_steps
            stack.enter_context(tracker.follow(work_dir / METRICS_JSONL, num_steps))
            rows_are_due = _every(_LOG_SECONDS)

            def on_rows(rows: list[MetricsRow]) -> None:
                text = show_rows(step.name, rows, num_steps)
                if rows_are_due():
                    logger.info("%s: step %s of %s: %s", step.name, f"{rows[-1].step:,}", f"{num_steps:,}", text)

            resources = dataclasses.replace(resources, on_rows=on_rows)
        yield resources


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


class _Share:
    """A number of lines that may still be written, which grows with time up to BURST_LINES."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.room, self.last, self.num_dropped = clock, float(BURST_LINES), clock(), 0

    def takes(self) -> bool:
        """Take room for one line. Return False, and count the line as dropped, if there is no room."""
        now = self.clock()
        self.room = min(BURST_LINES, self.room + (now - self.last) * LINES_A_SECOND)
        self.last = now
        if self.room < 1:
            self.num_dropped += 1
            return False
        self.room -= 1
        return True
