"""The flow `vlm-sft`, from raw rows to a scored, registered model, and its subflows `prepare-data` and `evaluate`.

Each flow is a loop over its steps of the plan. The deployed flows have the same names and call the same functions.
"""

import logging
import signal
import threading
from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture, wait
from prefect.runtime import flow_run
from prefect.states import State

from dataset_builders.errors import InputError
from flows.pipeline.dask_pool import on_cluster
from flows.pipeline.garbage import prune_released
from flows.pipeline.limits import has_server
from flows.pipeline.mlflow_run import tracked
from flows.pipeline.plan import Plan
from flows.pipeline.prefect_changes import refuse_stored_results, shorten_errors, stopped_as_asked
from flows.pipeline.prefect_pages import publish_mlflow, publish_scores, publish_stages
from flows.pipeline.steps import EVALUATE, PREPARE_DATA, TRAIN, Needs
from flows.pipeline.tasks import register_task, stage_runs, stage_task
from flows.tracking.notes import run_name
from stages.answer.engine import check_engine
from stages.answer.heldout import heldout_samples
from stages.contamination.stage import contaminated_keys
from stages.release.hub import check_push
from stages.shared.artifacts.run_stage import check_places
from stages.shared.inputs.model_directory import opened_model
from stages.shared.launchers.job import check_launcher
from stages.shared.launchers.vllm import find_vllm
from stages.tokenize.shard import encoder_of
from trainer.contract.names import HF_EXPORT

_log = logging.getLogger("athanor.pipeline")
_LINK_SECONDS = 0.3  # a new store takes longer; then the link is published at the end of the run
refuse_stored_results()
shorten_errors()


def run_steps(plan: Plan, flow_name: str, tracking_run: str | None) -> None:
    """Run the steps of a flow that have no artifact yet, one after the other, and beside them the steps that may run at
    the same time, also those of later flows. If a step ends with an error, the steps beside it are stopped.

    Raises:
        InputError: a file or directory of the root is in the way of a step, said before the first step works; or the
            recipe names a subset that the samples do not have, said before they are tokenized.
    """
    check_places(plan.root, {step.stage.name for step in plan.steps})
    plan.check_subsets()
    waiting = [step for step in plan.steps if step.artifact is None]
    main = [step for step in waiting if step.flow == flow_name]
    names = {step.name for step in main}
    # If a server shares out the slots of this machine, a step that needs a slot waits for its turn.
    shares_slots = has_server()
    beside = [s for s in waiting if s.beside in names and not (shares_slots and Needs.SLOT in s.needs)]
    futures: list[PrefectFuture[State | None]] = []
    stop = threading.Event()
    with stopped_as_asked():
        try:
            for step in (step for step in main if step not in beside):
                for other in (other for other in beside if other.beside == step.name):
                    task = stage_task.with_options(name=other.name)
                    futures.append(task.submit(plan, other.name, tracking_run, stop))
                if stage_task.with_options(name=step.name)(plan, step.name, tracking_run) is not None:
                    raise TerminationSignal(signal.SIGTERM)
                if step.name == "convert":
                    plan.check_subsets()
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            wait(futures)
            raise


@flow(name=PREPARE_DATA, flow_run_name="prepare data", persist_result=False)
def prepare_data(plan: Plan, tracking_run: str | None = None) -> None:
    """Run the data stages: raw rows -> sample shards -> tokenized shards -> bins."""
    with on_cluster(plan.config.execution, plan.root, [item.dir for item in plan.given.values()]):
        run_steps(plan, PREPARE_DATA, tracking_run)


@flow(name=EVALUATE, flow_run_name="evaluate", persist_result=False)
def evaluate(plan: Plan, tracking_run: str | None = None) -> list[str]:
    """Score an exported model.

    The stages make the answers to the held-out samples, their scores, the comparison with the model before training,
    and the model directory with its card. The model is registered if its scores pass the gates.

    Returns:
        one line per gate that failed.
    """
    run_steps(plan, EVALUATE, tracking_run)
    return register_task(plan, tracking_run)


def _flow_run_name() -> str:
    """Return the name of the MLflow run: the recipe and the settings that differ from it."""
    plan = flow_run.parameters["plan"]
    recipe, differs = (plan["recipe"], plan["differs"]) if isinstance(plan, Mapping) else (plan.recipe, plan.differs)
    return run_name(recipe, differs)


@flow(name=TRAIN, flow_run_name=_flow_run_name, persist_result=False)
def vlm_sft(plan: Plan) -> dict[str, Any]:
    """Make a scored, registered model from raw rows.

    Returns:
        plain values for a closing table: stages, hf_dir, scores with their intervals, the model's registered name and
        one line per gate that failed, the MLflow run, the answers of MLflow, whether it holds the run, and its pages.
    """
    execution = plan.config.execution
    check_launcher(execution.cluster)
    check_chat(plan)
    if plan.config.execution.cluster.is_here:  # this machine will generate the answers, after hours of training
        check_engine(plan.config.evaluate.engine)
        find_vllm()  # a wrong ATHANOR_VLLM_PYTHON: verify asks vLLM too
    check_push(execution.registry.push_to)
    with on_cluster(execution, plan.root, [item.dir for item in plan.given.values()]):
        pass  # its errors come now, and not when the first data stage needs the cluster
    with tracked(plan) as tracker:
        prepare_data(plan, tracker.key)
        check_heldout(plan)
        mlflow_url = tracker.url(_LINK_SECONDS if has_server() else 0)  # for people who watch the training
        publish_mlflow(mlflow_url)
        run_steps(plan, TRAIN, tracker.key)
        refusals = evaluate(plan, tracker.key)
        stats = publish_results(plan)
    if mlflow_url is None:
        publish_mlflow(mlflow_url := tracker.url())
    if tracker.is_sent():  # otherwise a later sender may be about to link the files of a checkpoint
        prune_released(plan.root, plan.artifact("train"))
    return {
        "stages": stage_runs(plan),
        "hf_dir": str(plan.artifact("release").dir / HF_EXPORT),
        "scores": stats["scores"],
        "counts": stats.get("counts", {}),
        "headlines": stats.get("headlines", {}),
        "warnings": stats.get("warnings", []),
        "registered_name": plan.config.mlflow_name,
        "refusals": refusals,
        "mlflow_run": tracker.key,
        "learnt": tracker.learnt(),
        "is_sent": tracker.is_sent(),
        "mlflow_url": mlflow_url,
        "compare_url": tracker.compare_with_last(),
    }


def publish_results(plan: Plan) -> dict[str, Any]:
    """Publish the pages of a flow run that has scored a model, and return the stats of the evaluation."""
    stats = plan.artifact("evaluate").manifest.stats
    publish_stages(stage_runs(plan), plan.root)
    publish_scores(stats, str(plan.artifact("release").dir))
    return stats


def check_chat(plan: Plan) -> None:
    """Check that the chat template of the user's model gives an answer the same prompt in training as at inference.

    This runs before any stage.

    Raises:
        InputError: the prompts differ, or the tokenizer cannot be used.
    """
    if "processor" in plan.given:
        processor = plan.given["processor"]
        # The stage uses this encoder, if it runs in this process.
        encoder_of(processor.dir, processor.digest, plan.config.tokenize, opened_model(processor))


def check_heldout(plan: Plan) -> None:
    """Check that there are samples to score, and warn if there are few. This runs before hours of training.

    Raises:
        InputError: there is no held-out sample, or every sample to be asked has an image that occurs in train.
    """
    samples, seen = plan.artifact("convert"), plan.artifact("contamination")
    num_asked = sum(shard.num_samples for shard in samples.manifest.shards if shard.split == "heldout")
    if not num_asked:
        raise InputError(
            f"{samples.dir} holds no held-out sample, so nothing could be evaluated; raise convert.heldout_fraction "
            "or read a split that the source holds out"
        )
    unscored = {} if seen is None else contaminated_keys(seen.dir)
    limit = plan.config.evaluate.max_samples_per_subset
    if unscored and limit is not None:
        asked = {sample.key for sample in heldout_samples(samples, None, limit)}
        num_asked, unscored = len(asked), {key: how for key, how in unscored.items() if key in asked}
    num_scored, least = num_asked - len(unscored), plan.config.convert.min_heldout
    num_near = sum(how == "near" for how in unscored.values())
    why = (
        f"{len(unscored)} of {num_asked} held-out samples count in no score: {len(unscored) - num_near} have a picture "
        f"that occurs in train, {num_near} have one that looks alike"
    )
    way_out = f"see {seen and seen.dir}/report.html, hold out others (convert.seed), or set contamination=null"
    if not num_scored:
        raise InputError(f"{why}, so nothing would be left; {way_out}")
    if unscored and num_scored < least:
        _log.warning("%s: %d are left, fewer than convert.min_heldout=%d; %s", why, num_scored, least, way_out)
