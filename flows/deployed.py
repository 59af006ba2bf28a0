"""The flows that a service offers: those of sft.py, asked for by a recipe's name and what differs from it.

They carry the same flow names as `athanor run` uses, so that the Prefect UI shows all runs of a flow together. A
request that is wrong ends as Failed at once, with the one line that says what to mend as the message of its state.
"""

from collections.abc import Callable, Mapping
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Failed, State

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, location
from flows.recipe import DEFAULT_RECIPE, Recipe, dotted_changes
from flows.request import Overrides, RecipeName, resolve_request, service_root
from flows.request_form import NONE
from flows.run_artifacts import publish_mlflow, publish_scores, publish_stages
from flows.sft import make_data, make_scores, run_pipeline
from flows.stage_graph import plan_stages
from flows.tasks import contamination_task
from flows.tracking_run import ends_with_failure, open_tracking
from stages.artifact import Artifact
from stages.model_card import check_push
from stages.tracking import Tracker, run_name


def request_name() -> str:
    """The name of the flow run, and of its MLflow run: the recipe and what differs from it."""
    given = flow_run.parameters
    recipe, overrides = given.get("recipe", ""), given.get("overrides") or {}
    try:
        asked = resolve_request(recipe, overrides, service_root())
        return run_name(asked.name, asked.differs)
    except InputError:  # the flow says it, as soon as it has a name
        return run_name(recipe, dotted_changes(overrides, NONE))


def answer(work: Callable[[Recipe, StorePath], Any], recipe: str, overrides: Mapping[str, Any]) -> Any:
    """Do the work of a request, or say in one line why it cannot be done."""
    try:
        root = service_root()
        return work(resolve_request(recipe, overrides, root), root)
    except InputError as error:
        return refused(error)


def refused(error: InputError) -> State:
    """A state that says what to mend, and nothing else."""
    return Failed(message=str(error))


@flow(name="vlm-sft", flow_run_name=request_name, persist_result=False)
def vlm_sft_request(recipe: RecipeName = DEFAULT_RECIPE, overrides: Overrides = {}) -> Any:  # noqa: B006
    """Raw rows to a scored, registered model.

    Args:
        recipe: where to start from; the settings below say what each recipe has.
        overrides: what differs from the recipe. Leave a field empty to keep what the recipe says.
    """
    return answer(
        lambda asked, root: run_pipeline(asked.config, str(root), asked.name, asked.differs), recipe, overrides
    )


@flow(name="prepare-data", flow_run_name=request_name, persist_result=False)
def prepare_data_request(recipe: RecipeName = DEFAULT_RECIPE, overrides: Overrides = {}) -> Any:  # noqa: B006
    """Raw rows to sample shards, tokenized shards and bins; a training finds them made.

    Args:
        recipe: where to start from; the settings below say what each recipe has.
        overrides: what differs from the recipe. Leave a field empty to keep what the recipe says.
    """
    return answer(_prepare, recipe, overrides)


@flow(name="evaluate", flow_run_name=request_name, persist_result=False)
def evaluate_request(recipe: RecipeName = DEFAULT_RECIPE, overrides: Overrides = {}) -> Any:  # noqa: B006
    """The answers and scores of a model that vlm-sft has exported with the same settings.

    Args:
        recipe: where to start from; the settings below say what each recipe has.
        overrides: what differs from the recipe. Leave a field empty to keep what the recipe says.
    """
    return answer(_evaluate, recipe, overrides)


def _prepare(asked: Recipe, root: StorePath) -> dict[str, Any]:
    runs, model_dir = make_data(asked.config, str(root))
    publish_stages(list(runs.values()))
    return {"stages": list(runs.values()), "model_dir": model_dir}


def _evaluate(asked: Recipe, root: StorePath) -> dict[str, Any]:
    planned, found = plan_stages(asked.config, root)
    missing = next((stage for stage in planned if stage.name == "export" and stage.artifact is None), None)
    if missing is not None:
        raise InputError(
            f"there is no exported model of recipe {asked.name} with these overrides yet ({missing.why}); "
            "run the deployment vlm-sft with the same values first"
        )
    check_push(asked.config.execution.registry.push_to)
    tracking_run = open_tracking(asked.config, str(root), found, asked.name, asked.differs)
    tracker = Tracker(root, tracking_run)
    with ends_with_failure(tracker):
        made = {name: str(item.dir) for name, item in found.items()}
        made["model"] = made.get("embedded_model") or made["model"]
        if asked.config.contamination is not None:
            made["contamination"] = contamination_task(asked.config, str(root), tracking_run, made["convert"])["dir"]
        runs = make_scores(asked.config, str(root), made, tracking_run)
    scores = Artifact.load(location(runs["evaluate"]["dir"])).manifest.stats["scores"]
    publish_stages(list(runs.values()))
    publish_scores(scores, runs["release"]["dir"])
    tracker.finish("FINISHED")
    publish_mlflow(tracker.url())
    return {"stages": list(runs.values()), "scores": scores}
