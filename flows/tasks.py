"""One Prefect task a stage. Prefect adds retries, logs and the UI; the manifest decides what is done.

Only paths and plain values cross a task border. No task has Prefect's timeout: it cannot interrupt a thread and knows
no child process; the launcher keeps the trainer's deadline. Only errors that may pass by themselves are retried. What
uses GPUs holds a slot of its place's concurrency limit while it runs.

Cancelling a flow run sends SIGTERM to its process, which Prefect raises as an exception where the task is: the launcher
gives the trainer time to save, and ends it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.store import local_dir, location
from flows.cancelling import inner_run_cancelled
from flows.dask_pool import with_cluster
from flows.limits import slot_of, wait_for_server
from flows.pipeline_config import PipelineConfig
from flows.progress import display, show_rows
from flows.run_record import record_run
from flows.stage_graph import get_stage, load_input, release_config
from flows.trainer_log import log_lines
from stages.answer import AnswerResources
from stages.artifact import Artifact, External, Input, StageResult, artifact_dir, run_stage, stage_identity
from stages.evaluate_config import EvaluateResources
from stages.gates import refusals
from stages.model_card import push_to_hub
from stages.scoring.names import flat_scores
from stages.tracking import Tracker
from stages.train import TrainResources
from stages.workers import StageResources
from trainer.contract import HF_EXPORT, MetricsRow

_LOG_SECONDS = 10.0
_SCORED = ("evaluate", "compare")


class StageRun(TypedDict):
    """What a stage's task returns: where its artifact is, and what it cost."""

    stage: str
    dir: str
    reused: bool
    seconds: float


def _may_pass(_task: object, _task_run: object, state: Any) -> bool:
    """Retry what a second try may cure (a network file system, a connection), never what the user must mend."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError) and not isinstance(error, InputError)


_POLICY: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": 1,
    "retry_delay_seconds": 10,
    "retry_condition_fn": _may_pass,
    "persist_result": False,
}


@task(name="embedded_data", **_POLICY)
def embedded_data_task(config: PipelineConfig, root: str, tracking_run: str | None) -> StageRun:
    """Write the embedded raw rows."""
    return _run("embedded_data", config, config.data, {}, root, tracking_run)


@task(name="drawn_data", **_POLICY)
def drawn_data_task(config: PipelineConfig, root: str, tracking_run: str | None) -> StageRun:
    """Write the drawn raw rows."""
    return _run("drawn_data", config, config.data, {}, root, tracking_run)


@task(name="embedded_model", **_POLICY)
def embedded_model_task(
    config: PipelineConfig, root: str, tracking_run: str | None, raw_dir: str, raw_digest: str
) -> StageRun:
    """Make the embedded model; its tokenizer is trained on the raw rows."""
    return _run("embedded_model", config, config.model, {"raw": _raw(raw_dir, raw_digest)}, root, tracking_run)


@task(name="convert", **_POLICY)
def convert_task(
    config: PipelineConfig, root: str, tracking_run: str | None, raw_dir: str, raw_digest: str
) -> StageRun:
    """Raw rows -> sample shards."""
    return _run("convert", config, config.convert, {"raw": _raw(raw_dir, raw_digest)}, root, tracking_run)


@task(name="contamination", **_POLICY)
def contamination_task(config: PipelineConfig, root: str, tracking_run: str | None, samples_dir: str) -> StageRun:
    """Sample shards -> which held-out pictures occur in train."""
    inputs = {"samples": Artifact.load(location(samples_dir))}
    return _run("contamination", config, config.contamination, inputs, root, tracking_run)


@task(name="tokenize", **_POLICY)
def tokenize_task(
    config: PipelineConfig, root: str, tracking_run: str | None, samples_dir: str, processor_dir: str
) -> StageRun:
    """Sample shards -> tokenized shards."""
    processor = load_input(location(processor_dir), "processor")
    inputs = {"samples": Artifact.load(location(samples_dir)), "processor": processor}
    return _run("tokenize", config, config.tokenize, inputs, root, tracking_run)


@task(name="plan_bins", **_POLICY)
def plan_bins_task(config: PipelineConfig, root: str, tracking_run: str | None, tokenized_dir: str) -> StageRun:
    """Lengths -> bins."""
    inputs = {"tokenized": Artifact.load(location(tokenized_dir))}
    return _run("plan_bins", config, config.plan_bins, inputs, root, tracking_run)


@task(name="train", **_POLICY)
def train_task(
    config: PipelineConfig, root: str, tracking_run: str | None, model_dir: str, tokenized_dir: str, bins_dir: str
) -> StageRun:
    """Bins and weights -> checkpoints; metrics go to MLflow while it runs, what was missed at its end."""
    inputs = {
        "model": load_input(location(model_dir), "model"),
        "tokenized": Artifact.load(location(tokenized_dir)),
        "bins": Artifact.load(location(bins_dir)),
    }
    record_run(location(root), tracking_run)
    tracker = Tracker(location(root), tracking_run)
    sink, say = tracker.sink(), _progress_logger(config.train.num_steps)

    def on_rows(rows: list[MetricsRow]) -> None:
        sink(rows)
        show_rows("train", rows, config.train.num_steps)
        say(rows)

    try:
        result = _timed("train", config.train, inputs, root, _train_resources(config, on_rows))
    finally:
        sink.close()
    tracker.replay_metrics(result.artifact)
    tracker.log_stage(result.artifact, result.reused)
    return _stage_run("train", result)


@task(name="export", **_POLICY)
def export_task(
    config: PipelineConfig, root: str, tracking_run: str | None, train_dir: str, model_dir: str, tokenized_dir: str
) -> StageRun:
    """Newest checkpoint -> HF directory."""
    inputs = {
        "train": Artifact.load(location(train_dir)),
        "model": load_input(location(model_dir), "model"),
        "tokenized": Artifact.load(location(tokenized_dir)),
    }
    return _run("export", config, config.export, inputs, root, tracking_run, _train_resources(config))


@task(name="answer", task_run_name="{name}", **_POLICY)
def answer_task(
    config: PipelineConfig, root: str, tracking_run: str | None, dirs: Mapping[str, str], name: str = "answer"
) -> StageRun:
    """HF directory and held-out samples -> what the model says; where the trainer runs.

    Args:
        dirs: role -> directory of each input.
    """
    others = {role: directory for role, directory in dirs.items() if role != "hf"}
    inputs = {"hf": load_input(location(dirs["hf"]), "model"), **_artifacts(others)}
    resources = AnswerResources(cluster=config.execution.cluster, on_progress=_on_progress(name), on_line=log_lines())
    return _run(name, config, config.evaluate.answer, inputs, root, tracking_run, resources)


@task(name="evaluate", task_run_name="{name}", **_POLICY)
def evaluate_task(
    config: PipelineConfig, root: str, tracking_run: str | None, dirs: Mapping[str, str], name: str = "evaluate"
) -> StageRun:
    """Answers and held-out samples -> scores.

    Args:
        dirs: role -> directory of each input.
    """
    resources = EvaluateResources(on_progress=_on_progress(name))
    return _run(name, config, config.evaluate, _artifacts(dirs), root, tracking_run, resources)


@task(name="compare", **_POLICY)
def compare_task(config: PipelineConfig, root: str, tracking_run: str | None, dirs: Mapping[str, str]) -> StageRun:
    """Scores before and after training -> by how much they differ, and where; the gain goes to MLflow.

    Args:
        dirs: role -> directory of each input.
    """
    done = _run("compare", config, config.compare, _artifacts(dirs), root, tracking_run, StageResources())
    Tracker(location(root), tracking_run).log_comparison(Artifact.load(location(done["dir"])))
    return done


@task(name="release", **_POLICY)
def release_task(config: PipelineConfig, root: str, tracking_run: str | None, dirs: Mapping[str, str]) -> StageRun:
    """The exported model and all that is known of it -> a directory with a model card.

    Args:
        dirs: role -> directory of each input.
    """
    return _run("release", config, release_config(config), _artifacts(dirs), root, tracking_run, StageResources())


@task(name="register", **_POLICY)
def register_task(config: PipelineConfig, root: str, tracking_run: str | None, dirs: Mapping[str, str]) -> list[str]:
    """The model and its scores to MLflow; registered, and pushed to a hub where the recipe says so, if the gates hold.

    Args:
        dirs: stage -> directory of "export", "evaluate", "release" and, where there is one, "compare".

    Returns:
        why it is not registered; empty where it is.
    """
    made, tracker = _artifacts(dirs), Tracker(location(root), tracking_run)
    scores, registry = made["evaluate"].manifest.stats["scores"], config.execution.registry
    refused = why_not_registered(config, dirs)
    for reason in refused:
        get_run_logger().warning("the model is not registered: %s", reason)
    name, hf_dir = registered_name(config), made["release"].dir / HF_EXPORT
    tracker.log_evaluation(made["evaluate"], tracker.log_model(made["export"], hf_dir, scores, name, refused))
    if registry.push_to is not None and not refused:
        page = push_to_hub(local_dir(hf_dir), registry.push_to, registry.push_private)
        get_run_logger().info("the model is at %s", page)
    return refused


def registered_name(config: PipelineConfig) -> str:
    """Of the model in MLflow's registry."""
    return f"athanor-{config.name}"


def why_not_registered(config: PipelineConfig, dirs: Mapping[str, str]) -> list[str]:
    """A line a gate that does not hold; empty where the model is registered.

    Args:
        dirs: stage -> directory of "evaluate" and, where there is one, "compare".
    """
    stats = {stage: Artifact.load(location(dirs[stage])).manifest.stats for stage in _SCORED if stage in dirs}
    gains = stats["compare"]["gains"] if "compare" in stats else None
    return refusals(config.execution.registry.gates, flat_scores(stats["evaluate"]["scores"]), gains)


def _artifacts(dirs: Mapping[str, str]) -> dict[str, Artifact]:
    return {role: Artifact.load(location(directory)) for role, directory in dirs.items()}


def _raw(raw_dir: str, raw_digest: str) -> Input:
    """The raw rows; the digest is empty where a stage made them."""
    path = location(raw_dir)
    return External(path, "raw", raw_digest) if raw_digest else Artifact.load(path)


def _run(
    name: str,
    config: PipelineConfig,
    stage_config: Any,
    inputs: Mapping[str, Input],
    root: str,
    tracking_run: str | None,
    resources: object = None,
) -> StageRun:
    record_run(location(root), tracking_run)
    if resources is not None:
        result = _timed(name, stage_config, inputs, root, resources)
    else:
        workers = config.execution.num_workers or os.cpu_count() or 1
        here = StageResources(num_workers=workers, on_progress=_on_progress(name))
        with with_cluster(here, config.execution) as where:
            result = _timed(name, stage_config, inputs, root, where)
    hf_dir = local_dir(inputs["processor"].dir) if "processor" in inputs else None  # whose tokenizer spells the tokens
    Tracker(location(root), tracking_run).log_stage(result.artifact, result.reused, hf_dir, name)
    return _stage_run(name, result)


def _timed(name: str, stage_config: Any, inputs: Mapping[str, Input], root: str, resources: object) -> StageResult:
    display().started(name)
    with inner_run_cancelled(), _slot(name, stage_config, inputs, root, resources):
        result = run_stage(get_stage(name), stage_config, inputs, location(root), resources)
    wait_for_server()
    display().ended(name, result.reused, result.seconds)
    how = "reused" if result.reused else f"made in {result.seconds:.1f} s:"
    get_run_logger().info("%s %s %s", name, how, result.artifact.dir)
    return result


def _slot(
    name: str, stage_config: Any, inputs: Mapping[str, Input], root: str, resources: object
) -> contextlib.AbstractContextManager[None]:
    """What the stage holds while it runs: a slot where it uses GPUs, nothing where it is made already."""
    if not isinstance(resources, TrainResources | AnswerResources):
        return contextlib.nullcontext()
    stage = get_stage(name)
    directory = artifact_dir(location(root), stage, stage_identity(stage, stage_config, inputs))
    is_made = (directory / MANIFEST).is_file()
    return contextlib.nullcontext() if is_made else slot_of(resources.cluster.limit, location(root))


def _stage_run(name: str, result: StageResult) -> StageRun:
    return StageRun(stage=name, dir=str(result.artifact.dir), reused=result.reused, seconds=round(result.seconds, 2))


def _on_progress(name: str) -> Callable[[int, int], None]:
    return lambda done, total: display().progressed(name, done, total)


def _train_resources(config: PipelineConfig, on_rows: Callable | None = None) -> TrainResources:
    execution = config.execution
    listeners = {"on_rows": on_rows} if on_rows else {}
    return TrainResources(
        on_line=log_lines(),
        cluster=execution.cluster,
        parallel=execution.parallel,
        checkpoint=execution.checkpoint,
        loader_workers=execution.loader_workers,
        cuda_graphs=execution.cuda_graphs,
        log_interval=execution.log_interval,
        profile=execution.profile,
        **listeners,
    )


def _progress_logger(num_steps: int) -> Callable[[list[MetricsRow]], None]:
    """A listener that writes the newest row to the Prefect log now and then."""
    logger, last = get_run_logger(), [0.0]

    def say(rows: list[MetricsRow]) -> None:
        if time.monotonic() - last[0] >= _LOG_SECONDS:
            last[0] = time.monotonic()
            logger.info("step %d of %d: loss %.4f, lr %.3g", rows[-1].step, num_steps, rows[-1].loss, rows[-1].lr)

    return say
