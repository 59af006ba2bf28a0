"""The flow `vlm-sft`, whole: raw rows to a scored, registered model; `prepare-data` and `evaluate` on their own too."""

from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import BaseModel

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, location
from flows.dask_pool import check_cluster, on_cluster
from flows.limits import has_server
from flows.pipeline_config import PipelineConfig
from flows.run_artifacts import publish_mlflow, publish_scores, publish_stages
from flows.stage_graph import data_stage, external_digests, open_inputs
from flows.tasks import (
    StageRun,
    answer_task,
    compare_task,
    contamination_task,
    convert_task,
    drawn_data_task,
    embedded_data_task,
    embedded_model_task,
    evaluate_task,
    export_task,
    plan_bins_task,
    register_task,
    registered_name,
    release_task,
    tokenize_task,
    train_task,
    why_not_registered,
)
from flows.tracking_run import ends_with_failure, open_tracking
from stages.answer_engine import check_engine
from stages.artifact import Artifact, Input
from stages.launch import check_launcher
from stages.model_card import check_push
from stages.tracking import Tracker, run_name
from trainer.contract import HF_EXPORT

Runs = dict[str, StageRun]
_LINK_SECONDS = 0.3  # a fresh store takes longer, and gets its link at the end


@flow(name="prepare-data", flow_run_name="prepare data", persist_result=False)
def prepare_data(config: PipelineConfig, root: str, tracking_run: str | None = None) -> tuple[Runs, str]:
    """Raw rows -> sample shards -> tokenized shards -> bins.

    Returns:
        the stages' runs by name, and the directory of the model whose processor was used.
    """
    return make_data(config, root, tracking_run)


def make_data(config: PipelineConfig, root: str, tracking_run: str | None = None) -> tuple[Runs, str]:
    """The body of `prepare-data`, for the flow of that name and for the deployed one."""
    found = open_inputs(config, location(root))
    with on_cluster(config.execution, location(root), _dirs(found)):
        return _make_data(config, root, tracking_run, found)


def _make_data(
    config: PipelineConfig, root: str, tracking_run: str | None, found: Mapping[str, Input]
) -> tuple[Runs, str]:
    runs, common = Runs(), (config, root, tracking_run)
    if (stage := data_stage(config)) is not None:
        make_rows = drawn_data_task if stage == "drawn_data" else embedded_data_task
        runs[stage] = make_rows(*common)
        raw_dir, raw_digest = runs[stage]["dir"], ""
    else:
        raw_dir, raw_digest = str(found["raw"].dir), external_digests(found)["raw"]
    if isinstance(config.model, BaseModel):
        runs["embedded_model"] = embedded_model_task(*common, raw_dir, raw_digest)
        model_dir = runs["embedded_model"]["dir"]
        processor_dir = str(location(model_dir) / HF_EXPORT)
    else:
        model_dir = processor_dir = str(found["model"].dir)
    runs["convert"] = convert_task(*common, raw_dir, raw_digest)
    if config.contamination is not None:
        runs["contamination"] = contamination_task(*common, runs["convert"]["dir"])
    runs["tokenize"] = tokenize_task(*common, runs["convert"]["dir"], processor_dir)
    runs["plan_bins"] = plan_bins_task(*common, runs["tokenize"]["dir"])
    return runs, model_dir


def _dirs(found: Mapping[str, Input]) -> list[StorePath]:
    return [item.dir for item in found.values()]


@flow(name="evaluate", flow_run_name="evaluate", persist_result=False)
def evaluate(config: PipelineConfig, root: str, made: dict[str, str], tracking_run: str | None = None) -> Runs:
    """An exported model's answers to the held-out samples, their scores, how they differ from the model's before
    training, and the model with its card; it is registered where its scores hold.

    Args:
        made: node of the pipeline -> its directory; see `make_scores`.
    """
    return make_scores(config, root, made, tracking_run)


def make_scores(config: PipelineConfig, root: str, made: Mapping[str, str], tracking_run: str | None) -> Runs:
    """The body of `evaluate`, for the flow of that name and for the deployed one.

    Args:
        made: directories of "convert", "tokenize", "train", "export", of "model", which is the one before training,
            and of "contamination" where that is looked for.
    """
    common, runs = (config, root, tracking_run), Runs()
    asked = {"samples": made["convert"]}
    scored = asked | ({} if config.contamination is None else {"contamination": made["contamination"]})
    runs["answer"] = answer_task(*common, {"hf": made["export"], **asked})
    answers = {"answers": runs["answer"]["dir"], **scored}
    runs["evaluate"] = evaluate_task(*common, {**answers, "made_by": made["train"]})
    results = {"export": made["export"], "evaluate": runs["evaluate"]["dir"]}
    if config.compare is not None:
        runs |= _compare(config, root, made, tracking_run, scored, runs["evaluate"]["dir"])
        results["compare"] = runs["compare"]["dir"]
    runs["release"] = release_task(*common, {**results, "train": made["train"], **scored})
    register_task(*common, {**results, "release": runs["release"]["dir"]})
    return runs


def _compare(
    config: PipelineConfig,
    root: str,
    made: Mapping[str, str],
    tracking_run: str | None,
    scored: Mapping[str, str],
    tuned_dir: str,
) -> Runs:
    """The same questions to the model before training, as the trained one was asked, and the difference."""
    common, runs = (config, root, tracking_run), Runs()
    asked = {"hf": made["model"], "samples": made["convert"], "tokenized": made["tokenize"]}
    runs["answer_base"] = answer_task(*common, asked, "answer_base")
    answers = {"answers": runs["answer_base"]["dir"], **scored}
    runs["evaluate_base"] = evaluate_task(*common, {**answers, "start_of": made["train"]}, "evaluate_base")
    both = {"base": runs["evaluate_base"]["dir"], "tuned": tuned_dir}
    runs["compare"] = compare_task(*common, {**both, "samples": made["convert"]})
    return runs


def _flow_run_name() -> str:
    """The name of the MLflow run: the recipe and what differs from it."""
    given = flow_run.parameters
    config = given["config"]
    name = config["name"] if isinstance(config, Mapping) else config.name
    return run_name(given.get("recipe") or name, given.get("differs") or {})


@flow(name="vlm-sft", flow_run_name=_flow_run_name, persist_result=False)
def vlm_sft(
    config: PipelineConfig, root: str, recipe: str = "", differs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Raw rows to a scored, registered model.

    Args:
        root: directory under which everything lies.
        recipe: name of the recipe, for the MLflow run's name and tags.
        differs: fields that differ from the recipe; they go into the run's name.

    Returns:
        plain values for a closing table: stages, hf_dir, scores, the model's name and why it is not registered under
        it (nothing where it is), the MLflow run and its pages.
    """
    return run_pipeline(config, root, recipe, differs)


def run_pipeline(
    config: PipelineConfig, root: str, recipe: str = "", differs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The body of `vlm-sft`, for the flow of that name and for the deployed one; see there."""
    found = open_inputs(config, location(root))
    check_launcher(config.execution.cluster)
    check_answering(config)
    check_push(config.execution.registry.push_to)
    check_cluster(config.execution, location(root), _dirs(found))
    tracking_run = open_tracking(config, root, found, recipe or config.name, differs or {})
    tracker = Tracker(location(root), tracking_run)
    with ends_with_failure(tracker):
        runs, model_dir = prepare_data(config, root, tracking_run)
        _check_heldout(runs["convert"]["dir"])
        mlflow_url = tracker.url(_LINK_SECONDS if has_server() else 0)  # for whoever looks on while it trains
        publish_mlflow(mlflow_url)
        common, tokenized_dir = (config, root, tracking_run), runs["tokenize"]["dir"]
        runs["train"] = train_task(*common, model_dir, tokenized_dir, runs["plan_bins"]["dir"])
        runs["export"] = export_task(*common, runs["train"]["dir"], model_dir, tokenized_dir)
        made = {name: run["dir"] for name, run in runs.items()} | {"model": model_dir}
        runs |= evaluate(config, root, made, tracking_run)
    stats = Artifact.load(location(runs["evaluate"]["dir"])).manifest.stats
    publish_stages(list(runs.values()))
    publish_scores(stats["scores"], runs["release"]["dir"])
    tracker.finish("FINISHED")
    if mlflow_url is None:
        publish_mlflow(mlflow_url := tracker.url())
    return {
        "stages": list(runs.values()),
        "hf_dir": str(location(runs["release"]["dir"]) / HF_EXPORT),
        "scores": stats["scores"],
        "counts": stats.get("counts", {}),
        "registered_name": registered_name(config),
        "refused": why_not_registered(config, {name: run["dir"] for name, run in runs.items()}),
        "mlflow_run": tracking_run,
        "mlflow_url": mlflow_url,
        "compare_url": tracker.compare_with_last(),
    }


def check_answering(config: PipelineConfig) -> None:
    """Before hours of training: see that the library that answers is here, where it is here that it answers.

    Raises:
        InputError: it is not.
    """
    if config.execution.cluster.launcher == "torchrun":
        check_engine(config.evaluate.engine)


def _check_heldout(samples_dir: str) -> None:
    """Before hours of training: see that there is something to evaluate on."""
    shards = Artifact.load(location(samples_dir)).manifest.shards
    if not any(shard.split == "heldout" and shard.num_samples for shard in shards):
        raise InputError(
            f"{samples_dir} holds no held-out sample, so nothing could be evaluated; raise convert.heldout_fraction "
            "or read a split that the source holds out"
        )
