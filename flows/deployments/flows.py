"""The flows that a service offers: the flows of pipeline/flow.py, with a recipe's name and overrides as parameters.

These flows have the same names as the flows of `athanor run`, so that the Prefect UI shows all runs of a flow together.
They call the plain functions of the other flows, so that one run is one flow run. A wrong request fails at once, and
the message of its state is one line that says what to fix.
"""

from collections.abc import Callable, Mapping
from typing import Any

from prefect import flow
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Failed, State

from dataset_builders.errors import InputError
from flows.deployments.request import Overrides, RecipeName, resolve_request, service_root
from flows.pipeline.flow import evaluate, prepare_data, publish_results, run_steps, vlm_sft
from flows.pipeline.mlflow_run import tracked
from flows.pipeline.plan import Plan
from flows.pipeline.prefect_pages import publish_mlflow, publish_stages
from flows.pipeline.recipe import DEFAULT_RECIPE, dotted_changes
from flows.pipeline.steps import EVALUATE, PREPARE_DATA
from flows.pipeline.tasks import stage_runs
from flows.tracking.notes import run_name
from stages.release.hub import check_push


def request_name() -> str:
    """Return the name of the flow run and of its MLflow run: the recipe and the settings that differ from it."""
    parameters = flow_run.parameters
    recipe, overrides = parameters.get("recipe", ""), parameters.get("overrides") or {}
    try:
        resolved = resolve_request(recipe, overrides, service_root())
        return run_name(resolved.name, resolved.differs)
    except InputError:  # the flow itself raises the error again, once it has a name
        return run_name(recipe, dotted_changes(overrides))


def run_request(work: Callable[[Plan], Any], recipe: str, overrides: Mapping[str, Any]) -> Any:
    """Do the work of a request and return its result. Return a Failed state with the reason if the request is wrong."""
    try:
        root = service_root()
        return work(Plan.open(resolve_request(recipe, overrides, root), root))
    except InputError as error:
        return refusal(error)


def refusal(error: InputError) -> State:
    """Return the failed state, under a name of its own, whose message says what to fix."""
    return Failed(name="Refused", message=str(error))


@flow(name="vlm-sft", flow_run_name=request_name, persist_result=False)
def vlm_sft_request(recipe: RecipeName = DEFAULT_RECIPE, overrides: Overrides = {}) -> Any:  # noqa: B006
    """Make a scored, registered model from raw rows.

    Args:
        recipe: the recipe to start from; the settings below show the values of each recipe.
        overrides: settings that differ from the recipe. Leave a field empty to keep the recipe's value.
    """
    return run_request(_run_whole, recipe, overrides)


@flow(name="prepare-data", flow_run_name=request_name, persist_result=False)
def prepare_data_request(recipe: RecipeName = DEFAULT_RECIPE, overrides: Overrides = {}) -> Any:  # noqa: B006
    """Make sample shards, tokenized shards and bins from raw rows. A training with the same settings reuses them.

    Args:
        recipe: the recipe to start from; the settings below show the values of each recipe.
        overrides: settings that differ from the recipe. Leave a field empty to keep the recipe's value.
    """
    return run_request(_prepare, recipe, overrides)


@flow(name="evaluate", flow_run_name=request_name, persist_result=False)
def evaluate_request(recipe: RecipeName = DEFAULT_RECIPE, overrides: Overrides = {}) -> Any:  # noqa: B006
    """Make the answers and scores of a model that vlm-sft has exported with the same settings.

    Args:
        recipe: the recipe to start from; the settings below show the values of each recipe.
        overrides: settings that differ from the recipe. Leave a field empty to keep the recipe's value.
    """
    return run_request(_evaluate, recipe, overrides)


def tell_champion(name: str, verdict: str, url: str | None) -> None:
    """Send Prefect the event athanor.champion, from which an automation can start, if the verdict says so.

    Args:
        verdict: the decision on the model, see `flows.tracking.registry.decide`.
        url: address of the run's page in MLflow.
    """
    if verdict.endswith(": champion"):
        payload = {"model": name, "message": verdict, "url": url or ""}
        emit_event("athanor.champion", resource={"prefect.resource.id": f"athanor.model.{name}"}, payload=payload)


def _run_whole(plan: Plan) -> dict[str, Any]:
    result = vlm_sft.fn(plan)
    tell_champion(result["registered_name"], result["learnt"].verdict, result["mlflow_url"])
    return result


def _prepare(plan: Plan) -> dict[str, Any]:
    prepare_data.fn(plan)
    publish_stages(stage_runs(plan), plan.root)
    return {"stages": stage_runs(plan)}


def _evaluate(plan: Plan) -> dict[str, Any]:
    why = plan.find_finished()
    if plan.artifact("export") is None:
        raise InputError(
            f"there is no exported model of recipe {plan.recipe} with these overrides yet ({why['export']}); "
            "run the deployment vlm-sft with the same values first"
        )
    check_push(plan.config.execution.registry.push_to)
    for step in plan.steps:
        if step.flow == EVALUATE:
            step.artifact = None  # a run reuses it, and MLflow's run gets its scores
    with tracked(plan) as tracker:
        # The export does not depend on some stages, such as contamination, which may not have run with these settings.
        run_steps(plan, PREPARE_DATA, tracker.key)
        evaluate.fn(plan, tracker.key)
        stats = publish_results(plan)
    publish_mlflow(url := tracker.url())
    tell_champion(plan.config.mlflow_name, tracker.learnt().verdict, url)
    return {"stages": stage_runs(plan), "scores": stats["scores"]}
