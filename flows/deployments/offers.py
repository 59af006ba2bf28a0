"""Register the deployments: the flows of a service for the Prefect UI, `prefect deployment run` and schedules.

A worker registers them at its start: that of `athanor up`, and `ATHANOR_ROOT=DIR python -m flows.service.work` with a
Prefect server of your own at PREFECT_API_URL.

The pool's job template has no variables, so no request can set the command, the environment or the directory of a flow
run. Athanor's worker (service/closed_worker.py) ignores such variables in any case.
"""

import contextlib
import importlib.metadata
import logging
import re
from dataclasses import dataclass
from typing import Any

from prefect import Flow
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
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

from flows.deployments.flows import evaluate_request, prepare_data_request, vlm_sft_request
from flows.deployments.sweep import sweep_request
from flows.libraries.prefect_private import parameter_schema
from flows.prefect_server.service_record import POOL

TAG = "athanor"  # of every deployment, and so of its flow runs
NIGHTLY = "vlm-sft-nightly"
NIGHTLY_CRON = "0 2 * * *"
JOB_TEMPLATE = {
    "job_configuration": {"env": {}, "labels": {}, "stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")  # replaced, since the page makes a paragraph of each line
log = logging.getLogger("athanor.deployments")


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
Choose a recipe and fill in the settings that shall differ. An empty field keeps the recipe's value, which is shown next
to the field. A wrong value is refused at once, with the name of its field. Finished stages are reused, and *Retry* of a
run that was cancelled, failed or cut off resumes from its last checkpoint.
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
*Schedules* on the right, edit its time there, and its recipe and overrides under *Edit*. Your settings stay when
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
        f"""**Answers and scores of a model that is exported already**: give the recipe and the overrides of its
training; the overrides of `evaluate` may differ.
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
        registered = client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        deployment.apply()
        return full_name
    # Registering a second time would reset the schedules, so only the other fields are updated.
    fresh: dict[str, Any] = {
        "version": deployment.version,
        "description": deployment.description,
        "entrypoint": deployment.entrypoint,
        "parameter_openapi_schema": parameter_schema(deployment),
        "enforce_parameter_schema": True,
        "work_pool_name": pool,
        "job_variables": {},
        "pull_steps": [],
    }
    try:
        client.update_deployment(registered.id, DeploymentUpdate(**fresh))
    except PrefectHTTPStatusError as error:
        reason = " ".join(str(error.response.json().get("detail")).split())
        log.warning("deployment %s keeps default parameters that no longer fit: %s; edit them", full_name, reason)
    return full_name
