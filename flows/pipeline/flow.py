"""The flow `vlm-sft`, from raw rows to a scored, registered model, and its subflows `prepare-data` and `evaluate`.

Each flow is a loop over its nodes of the graph. The deployed flows have the same names and call the same functions.
"""

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from prefect import Task, flow
from prefect.futures import wait
from prefect.runtime import flow_run

from dataset_builders.errors import InputError
from dataset_builders.storage.store import local_dir, location
from flows.pipeline.config import PipelineConfig
from flows.pipeline.graph import (
    EVALUATE,
    PREPARE_DATA,
    TRAIN,
    ArtifactRef,
    Needs,
    Node,
    open_inputs,
    pipeline_nodes,
    place_of,
)
from flows.pipeline.mlflow_run import ends_with_failure, open_tracking
from flows.pipeline.one_line_errors import shorten_errors
from flows.pipeline.prefect_pages import publish_mlflow, publish_scores, publish_stages
from flows.pipeline.tasks import StageRun, register_task, stage_task
from flows.prefect_server.stored_results import refuse_stored_results
from flows.resources.cancelling import inner_run_cancelled
from flows.resources.dask_pool import check_cluster, on_cluster
from flows.resources.limits import has_server
from flows.tracking.notes import run_name
from flows.tracking.tracker import Tracker
from stages.answer.engine import check_engine
from stages.artifacts.artifact import Artifact, Input
from stages.contamination.stage import contaminated_keys
from stages.encode.chat import ChatEncoder
from stages.launchers.job import check_launcher
from stages.release.hub import check_push
from trainer.contract.names import HF_EXPORT

Runs = dict[str, StageRun]
_log = logging.getLogger("athanor.pipeline")
_LINK_SECONDS = 0.3  # a new store takes longer; then the link is published at the end of the run
refuse_stored_results()
shorten_errors()


def run_nodes(
    config: PipelineConfig,
    root: str,
    tracking_run: str | None,
    flow_name: str,
    places: dict[str, ArtifactRef],
) -> Runs:
    """Run the stages of a flow that have no place yet, one after the other, and beside them the stages that may run at
    the same time, also those of later flows. If a stage ends with an error, the stages beside it are stopped.

    Args:
        flow_name: a name in `NODES`.
        places: name of a node, or of an external input -> its place. The place of each new artifact is added.
    """
    nodes = [node for node in pipeline_nodes(config, [flow_name]) if node.name not in places]
    names = {node.name for node in nodes}
    others = [node for node in pipeline_nodes(config) if node.beside in names and node.name not in places]
    beside = [node for node in others if may_run_beside(node)]
    runs, futures, stop = Runs(), {}, threading.Event()

    def work(node: Node) -> tuple[Task, tuple[Any, ...]]:
        inputs = {role: places[source] for role, source in node.inputs.items()}
        return stage_task.with_options(name=node.name), (config, root, tracking_run, node, inputs)

    def keep(name: str, run: StageRun) -> None:
        runs[name], places[name] = run, ArtifactRef(dir=run["dir"])

    with inner_run_cancelled():
        try:
            for node in (node for node in nodes if node not in beside):
                for other in (other for other in beside if other.beside == node.name):
                    task, arguments = work(other)
                    futures[other.name] = task.submit(*arguments, stop)
                task, arguments = work(node)
                keep(node.name, task(*arguments))
            for name, future in futures.items():
                keep(name, future.result())
        except BaseException:
            stop.set()
            wait(list(futures.values()))
            raise
    return in_order(config, runs)


def in_order(config: PipelineConfig, runs: Runs) -> Runs:
    """Return the runs in the order of the graph."""
    return {node.name: runs[node.name] for node in pipeline_nodes(config) if node.name in runs}


def may_run_beside(node: Node) -> bool:
    """Whether a stage gets the resources to run beside another. If a server shares out the slots of this machine, a
    stage that needs a slot waits for its turn."""
    return Needs.SLOT not in node.needs or not has_server()


@flow(name=PREPARE_DATA, flow_run_name="prepare data", persist_result=False)
def prepare_data(
    config: PipelineConfig, root: str, tracking_run: str | None = None
) -> tuple[Runs, dict[str, ArtifactRef]]:
    """Run the data stages: raw rows -> sample shards -> tokenized shards -> bins.

    Returns:
        the stages' runs by name, and the places of all inputs for the later stages.
    """
    externals = open_inputs(config, location(root))
    places = {name: place_of(item) for name, item in externals.items()}
    with on_cluster(config.execution, location(root), [item.dir for item in externals.values()]):
        runs = run_nodes(config, root, tracking_run, PREPARE_DATA, places)
    return runs, places


@flow(name=EVALUATE, flow_run_name="evaluate", persist_result=False)
def evaluate(
    config: PipelineConfig, root: str, places: dict[str, ArtifactRef], tracking_run: str | None = None
) -> tuple[Runs, list[str]]:
    """Score an exported model.

    The stages make the answers to the held-out samples, their scores, the comparison with the model before training,
    and the model directory with its card. The model is registered if its scores pass the gates.

    Args:
        places: the places of all inputs, from the raw rows to the export.

    Returns:
        the stages' runs by name, and one line per gate that failed.
    """
    runs = run_nodes(config, root, tracking_run, EVALUATE, places)
    dirs = {name: places[name].dir for name in ("export", "evaluate", "compare", "reload", "release") if name in places}
    return runs, register_task(config, root, tracking_run, dirs)


def _flow_run_name() -> str:
    """Return the name of the MLflow run: the recipe and the settings that differ from it."""
    parameters = flow_run.parameters
    config = parameters["config"]
    name = config["name"] if isinstance(config, Mapping) else config.name
    return run_name(parameters.get("recipe") or name, parameters.get("differs") or {})


@flow(name=TRAIN, flow_run_name=_flow_run_name, persist_result=False)
def vlm_sft(
    config: PipelineConfig,
    root: str,
    recipe: str = "",
    differs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a scored, registered model from raw rows.

    Args:
        root: directory or URL below which all files are stored.
        recipe: name of the recipe, for the MLflow run's name and tags.
        differs: fields that differ from the recipe; they become part of the run's name.

    Returns:
        plain values for a closing table: stages, hf_dir, scores with their intervals, the model's registered name and
        one line per gate that failed, the MLflow run, the answers of MLflow, whether it holds the run, and its pages.
    """
    externals = open_inputs(config, location(root))
    check_launcher(config.execution.cluster)
    check_chat(config, externals)
    check_answering(config)
    check_push(config.execution.registry.push_to)
    check_cluster(config.execution, location(root), [item.dir for item in externals.values()])
    with tracked(config, root, externals, recipe or config.name, differs or {}) as tracker:
        runs, places = prepare_data(config, root, tracker.key)
        check_heldout({name: run["dir"] for name, run in runs.items()}, config)
        mlflow_url = tracker.url(_LINK_SECONDS if has_server() else 0)  # for people who watch the training
        publish_mlflow(mlflow_url)
        runs |= run_nodes(config, root, tracker.key, TRAIN, places)
        evaluation_runs, refusals = evaluate(config, root, places, tracker.key)
        runs = in_order(config, runs | evaluation_runs)
        stats = publish_results(runs, root)
    if mlflow_url is None:
        publish_mlflow(mlflow_url := tracker.url())
    return {
        "stages": list(runs.values()),
        "hf_dir": str(location(runs["release"]["dir"]) / HF_EXPORT),
        "scores": stats["scores"],
        "counts": stats.get("counts", {}),
        "headlines": stats.get("headlines", {}),
        "registered_name": config.mlflow_name,
        "refusals": refusals,
        "mlflow_run": tracker.key,
        "learnt": tracker.learnt(),
        "is_sent": tracker.is_sent(),
        "mlflow_url": mlflow_url,
        "compare_url": tracker.compare_with_last(),
    }


@contextlib.contextmanager
def tracked(
    config: PipelineConfig, root: str, inputs: Mapping[str, Input], recipe: str, differs: Mapping[str, Any]
) -> Iterator[Tracker]:
    """Open the MLflow run of the block. It ends as finished after the block, as failed or killed if an error ends it.

    Args:
        inputs: name -> input; the external inputs are part of the run's identity.
        recipe: name of the recipe.
        differs: dotted fields that differ from the recipe.
    """
    tracker = Tracker(location(root), open_tracking(config, root, inputs, recipe, differs))
    with ends_with_failure(tracker):
        yield tracker
    tracker.finish("FINISHED")


def publish_results(runs: Runs, root: str) -> dict[str, Any]:
    """Publish the pages of a flow run that has scored a model, and return the stats of the evaluation."""
    stats = Artifact.load(location(runs["evaluate"]["dir"])).manifest.stats
    publish_stages(list(runs.values()), root)
    publish_scores(stats, runs["release"]["dir"])
    return stats


def check_chat(config: PipelineConfig, externals: Mapping[str, Input]) -> None:
    """Check that the chat template of the user's model gives an answer the same prompt in training as at inference.

    This runs before any stage.

    Raises:
        InputError: the prompts differ, or the tokenizer cannot be used.
    """
    if "processor" in externals:
        ChatEncoder(local_dir(externals["processor"].dir), config.tokenize.learn, config.tokenize.system_prompt)


def check_answering(config: PipelineConfig) -> None:
    """Check that the library that generates answers is installed, if this machine will generate them.

    This runs before hours of training.

    Raises:
        InputError: the library is not installed.
    """
    if config.execution.cluster.launcher == "torchrun":
        check_engine(config.evaluate.engine)


def check_heldout(dirs: Mapping[str, str], config: PipelineConfig) -> None:
    """Check that there are samples to score, and warn if there are few. This runs before hours of training.

    Args:
        dirs: stage -> directory, for "convert" and, if the recipe has it, "contamination".

    Raises:
        InputError: there is no held-out sample, or every sample to be asked has an image that occurs in train.
    """
    samples = Artifact.load(location(dirs["convert"]))
    num_asked = sum(shard.num_samples for shard in samples.manifest.shards if shard.split == "heldout")
    if not num_asked:
        raise InputError(
            f"{samples.dir} holds no held-out sample, so nothing could be evaluated; raise convert.heldout_fraction "
            "or read a split that the source holds out"
        )
    unscored = contaminated_keys(location(dirs["contamination"])) if "contamination" in dirs else {}
    limit = config.evaluate.max_samples_per_subset
    if unscored and limit is not None:
        plan = importlib.import_module("stages.answer.plan")  # imported now, since it loads torch
        asked = {sample.key for sample in plan.heldout_samples(samples, limit)}
        num_asked, unscored = len(asked), {key: how for key, how in unscored.items() if key in asked}
    num_scored, least = num_asked - len(unscored), config.convert.min_heldout
    num_near = sum(how == "near" for how in unscored.values())
    why = (
        f"{len(unscored)} of {num_asked} held-out samples count in no score: {len(unscored) - num_near} have a picture "
        f"that occurs in train, {num_near} have one that looks alike"
    )
    way_out = f"see {dirs.get('contamination')}/report.html, hold out others (convert.seed), or set contamination=null"
    if not num_scored:
        raise InputError(f"{why}, so nothing would be left; {way_out}")
    if unscored and num_scored < least:
        _log.warning("%s: %d are left, fewer than convert.min_heldout=%d; %s", why, num_scored, least, way_out)
