"""The deployments: the flows that a service offers for the Prefect UI, `prefect deployment run` and schedules.

They are the flows of `flows/pipeline/flow.py`, with a recipe's name and settings as parameters, and under the same
names as in `athanor run`, so that the Prefect UI shows all runs of a flow together. They call the plain functions of
the other flows, so that one run is one flow run. A wrong request fails at once, and the message of its state is one
line that says what to fix.

A worker registers them at its start: that of `athanor up`, and `ATHANOR_ROOT=DIR python -m flows.service.work` with a
Prefect server of your own at PREFECT_API_URL. The pool's job template has no variables, so no request can set the
command, the environment or the directory of a flow run. Athanor's worker (`closed_worker.py`) ignores such variables in
any case.
"""

import contextlib
import importlib.metadata
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect import Flow, flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.events import emit_event
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Failed, State

from dataset_builders.errors import InputError
from flows.libraries.prefect_private import parameter_schema
from flows.pipeline.flow import evaluate, prepare_data, publish_results, run_steps, vlm_sft
from flows.pipeline.mlflow_run import tracked
from flows.pipeline.plan import Plan
from flows.pipeline.prefect_changes import suspendable
from flows.pipeline.prefect_pages import publish_mlflow, publish_stages
from flows.pipeline.recipe import DEFAULT_RECIPE, expand
from flows.pipeline.steps import EVALUATE, PREPARE_DATA
from flows.pipeline.tasks import stage_runs
from flows.service.form import Grid, Lines, RecipeName, RunName, Settings
from flows.service.request import resolve_request, service_root, without_null
from flows.service.sweep import closing_state, make_variants, sweep_variants
from flows.tracking.notes import MAX_NAME, run_name
from flows.tracking.servers import NIGHTLY, POOL
from stages.release.hub import check_push

TAG = "athanor"  # of every deployment, and so of its flow runs
NIGHTLY_CRON = "0 2 * * *"
JOB_TEMPLATE = {
    "job_configuration": {"env": {}, "labels": {}, "stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")  # replaced, since the page makes a paragraph of each line
log = logging.getLogger("athanor.deployments")


def request_name() -> str:
    """Return the name of the flow run and of its MLflow run: the typed one, or the recipe and what differs from it."""
    asked = flow_run.parameters
    recipe, settings = asked.get("recipe", ""), without_null(asked.get("settings") or {})
    if name := typed_name():
        return name
    try:
        resolved = resolve_request(recipe, asked.get("set") or "", settings, service_root())
        return run_name(resolved.name, resolved.differs)
    except InputError:  # the flow itself raises the error again, once it has a name
        return run_name(recipe, settings)


def typed_name() -> str:
    return " ".join((flow_run.parameters.get("name") or "").split())


def run_request(work: Callable[[Plan], Any], recipe: str, lines: str, settings: Mapping[str, Any]) -> Any:
    """Do the work of a request and return its result. Return a Failed state with the reason if the request is wrong."""
    try:
        root = service_root()
        with suspendable():
            return work(Plan.open(resolve_request(recipe, lines, settings, root), root))
    except InputError as error:
        return refusal(error)


def refusal(error: InputError, way_out: str = "") -> State:
    """Return the failed state, under a name of its own, whose message says what to fix."""
    return Failed(name="Refused", message="; ".join(filter(None, (str(error), way_out))))


@flow(name="vlm-sft", flow_run_name=request_name, persist_result=False)
def vlm_sft_request(
    recipe: RecipeName = DEFAULT_RECIPE,
    name: RunName = "",
    settings: Settings = {},  # noqa: B006
    set: Lines = "",
) -> Any:
    """Make a scored, registered model from raw rows."""
    return run_request(_run_whole, recipe, set, settings)


@flow(name="prepare-data", flow_run_name=request_name, persist_result=False)
def prepare_data_request(
    recipe: RecipeName = DEFAULT_RECIPE,
    name: RunName = "",
    settings: Settings = {},  # noqa: B006
    set: Lines = "",
) -> Any:
    """Make sample shards, tokenized shards and bins from raw rows. A training with the same settings reuses them."""
    return run_request(_prepare, recipe, set, settings)


@flow(name="evaluate", flow_run_name=request_name, persist_result=False)
def evaluate_request(
    recipe: RecipeName = DEFAULT_RECIPE,
    name: RunName = "",
    settings: Settings = {},  # noqa: B006
    set: Lines = "",
) -> Any:
    """Make the answers and scores of a model that vlm-sft has exported with the same settings."""
    return run_request(_evaluate, recipe, set, settings)


def _sweep_name() -> str:
    asked = flow_run.parameters
    return typed_name() or f"{asked.get('recipe', '')} by {', '.join(asked.get('grid') or {})}"[:MAX_NAME]


@flow(name="sweep", flow_run_name=_sweep_name, persist_result=False)
def sweep_request(
    recipe: RecipeName = DEFAULT_RECIPE,
    name: RunName = "",
    grid: Grid = {},  # noqa: B006
    settings: Settings = {},  # noqa: B006
    set: Lines = "",
) -> Any:
    """Run one recipe for every combination of a grid of values."""
    try:
        root = service_root()
        points = expand(grid)
        variants = make_variants([(point, resolve_request(recipe, set, settings, root, point)) for point in points])
    except InputError as error:
        return refusal(error)
    with suspendable():
        return closing_state(sweep_variants(variants, root))


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
            f"there is no exported model of recipe {plan.recipe} with these settings yet ({why['export']}); "
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


@dataclass(frozen=True, slots=True)
class Offer:
    """A deployment that a service offers.

    Attributes:
        about: Markdown that is shown on the page of the deployment.
        cron: cron expression of the schedule, or None. A schedule is off until somebody switches it on. A deployment
            with a schedule has one flow run at a time; a second one is cancelled.
    """

    name: str
    flow: Flow
    about: str
    cron: str | None = None


_HOW = """
Choose a recipe and fill in the settings that shall differ. A wrong value is refused at once, with the name of its
field and what is allowed. Finished stages are reused, and *Retry* of a
run that was cancelled, failed or cut off resumes from its last checkpoint, and so does *Resume* of a suspended one.
"""

OFFERS = (
    Offer(
        "vlm-sft",
        vlm_sft_request,
        f"""**Raw rows to a scored, registered model**: convert, tokenize, plan bins, train, export, answer, evaluate.
{_HOW}
The artifacts of the run show its stages, its scores and a link to MLflow. The same on the command line:
`athanor run RECIPE --set train.optim.lr=1e-3`.""",
    ),
    Offer(
        NIGHTLY,
        vlm_sft_request,
        f"""**The same as vlm-sft, every night at two** (`{NIGHTLY_CRON}`, UTC). The schedule is off: switch it on under
*Schedules* on the right, edit its time there, and its recipe and settings under *Edit*. Your settings stay when
athanor is started again or upgraded. A night is left out while the run of the night before is still going.""",
        cron=NIGHTLY_CRON,
    ),
    Offer(
        "prepare-data",
        prepare_data_request,
        f"""**Raw rows to sample shards, tokenized shards and bins**, without training. A training with the same
settings reuses them.
{_HOW}""",
    ),
    Offer(
        "evaluate",
        evaluate_request,
        f"""**Answers and scores of a model that is exported already**: give the recipe and the settings of its
training; those of `evaluate` may differ.
{_HOW}""",
    ),
    Offer(
        "sweep",
        sweep_request,
        f"""**One recipe, a run for every combination of a grid of values.** The grid is a JSON object of dotted fields
with the values to try: `{{"train.optim.lr": [0.001, 0.003], "train.seed": [0, 1]}}` is four runs. All are checked
before the first starts, shared stages are made once, and a run that fails does not stop the others. At the end there is
a table of all runs, with a link to MLflow's page that compares them.
{_HOW}""",
    ),
)


def register(pool: str = POOL, *, max_runs: int | None = None) -> list[str]:
    """Register every deployment with the server of PREFECT_API_URL, or bring it up to date.

    Schedules, default parameters, tags and pauses that people have set are kept. Job variables and another job template
    of the pool are overwritten.

    Args:
        pool: name of a process work pool, which is made if it does not exist.
        max_runs: number of flow runs of the pool at a time; None keeps the pool's present number.

    Returns:
        the full names of the deployments, "flow/deployment".
    """
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=JOB_TEMPLATE))
        limit = {} if max_runs is None else {"concurrency_limit": max_runs}
        client.update_work_pool(pool, WorkPoolUpdate(base_job_template=JOB_TEMPLATE, **limit))
        names = [_register(client, offer, pool) for offer in OFFERS]
    return names


def make_deployment(offer: Offer, pool: str) -> RunnerDeployment:
    """Return the deployment for Prefect. Its entrypoint is a module path, so a worker needs only athanor installed."""
    schedules, limit = None, None
    if offer.cron:
        every_night = CronSchedule(cron=offer.cron, timezone="UTC")
        schedules = [DeploymentScheduleCreate(schedule=every_night, active=False, slug="nightly")]
        limit = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    return offer.flow.to_deployment(
        name=offer.name,
        schedules=schedules,
        concurrency_limit=limit,
        description=_LINE_BREAK.sub(" ", offer.about.strip()),
        tags=[TAG],
        version=importlib.metadata.version("athanor-vlm"),
        enforce_parameter_schema=True,
        work_pool_name=pool,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _register(client: SyncPrefectClient, offer: Offer, pool: str) -> str:
    deployment = make_deployment(offer, pool)
    full_name = f"{deployment.flow_name}/{offer.name}"
    try:
        known = client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        known = client.read_deployment(deployment.apply())
    # Registering a second time would reset the schedules, so only the other fields are updated.
    fresh: dict[str, Any] = {
        "version": deployment.version,
        "description": deployment.description,
        "entrypoint": deployment.entrypoint,
        "parameter_openapi_schema": {**parameter_schema(deployment), "additionalProperties": False},
        "enforce_parameter_schema": True,
        "work_pool_name": pool,
        "job_variables": {},
        "pull_steps": [],
    }
    # An update deletes the coming runs of a schedule, and Prefect makes them anew only some time later: without this, a
    # night that is due meanwhile would be lost at the start of a worker.
    if json.loads(json.dumps(fresh)) == {name: getattr(known, name) for name in fresh}:
        return full_name
    try:
        client.update_deployment(known.id, DeploymentUpdate(**fresh))
    except PrefectHTTPStatusError as error:
        reason = " ".join(str(error.response.json().get("detail")).split())
        log.warning("deployment %s keeps default parameters that no longer fit: %s; edit them", full_name, reason)
        # Everything else must be as registered nevertheless. The worker refuses the runs, until the parameters fit.
        client.update_deployment(known.id, DeploymentUpdate(**fresh | {"enforce_parameter_schema": False}))
    return full_name
