"""Deployments: what a service offers in the Prefect UI, from `prefect deployment run` and on a schedule.

`athanor up` registers them. For a Prefect server of one's own: set PREFECT_API_URL, then `python -m flows.deployments
--root DIR` (once, and after every upgrade), and start workers: `ATHANOR_ROOT=DIR prefect worker start --pool athanor`.
"""

import argparse
import contextlib
import importlib.metadata
import logging
import os
import re
import sys
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

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, absolute, location
from flows.cli import DEFAULT_ROOT
from flows.compare import compare_request
from flows.deployed import evaluate_request, prepare_data_request, vlm_sft_request

POOL = "athanor"
NIGHTLY = "vlm-sft-nightly"
NIGHTLY_CRON = "0 2 * * *"
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")  # the page shows one inside a paragraph as a new paragraph
log = logging.getLogger("athanor.deployments")


@dataclass(frozen=True, slots=True)
class Offer:
    """A deployment.

    Attributes:
        about: Markdown, shown on the page of the deployment.
        cron: of its schedule, which is off until somebody switches it on; None: on demand.
        limit: of its flow runs at a time; one more is refused where there is a schedule, and else waits.
    """

    name: str
    flow: Flow
    about: str
    cron: str | None = None
    limit: int | None = None


_HOW = """
Choose a recipe and fill in what shall differ; an empty field keeps the recipe's value, which stands beside it. A wrong
value is refused at once, with the name of its field. What is finished already is reused, and *Retry* of a run that was
cancelled, failed or cut off goes on from its last checkpoint.
"""

OFFERS = (
    Offer(
        "vlm-sft",
        vlm_sft_request,
        f"""**Raw rows to a scored, registered model**: convert, tokenize, plan bins, train, export, answer, evaluate.
{_HOW}
The artifacts of the run show its stages, its scores and a link to MLflow. The same on a command line:
`athanor run RECIPE --set train.optim.lr=1e-3`.""",
    ),
    Offer(
        NIGHTLY,
        vlm_sft_request,
        f"""**The same as vlm-sft, every night at two** (`{NIGHTLY_CRON}`, UTC). The schedule is off: switch it on under
*Schedules* on the right, edit its time there, and its recipe and overrides under *Edit*. What you set there stays when
athanor is started again or upgraded. A night is left out while the one before still runs.""",
        cron=NIGHTLY_CRON,
        limit=1,
    ),
    Offer(
        "prepare-data",
        prepare_data_request,
        f"""**Raw rows to sample shards, tokenized shards and bins**, without training. A training with the same
settings finds them made.
{_HOW}""",
    ),
    Offer(
        "evaluate",
        evaluate_request,
        f"""**Answers and scores of a model that is exported already**: give the recipe and the overrides that it was
made with; those of `evaluate` may differ.
{_HOW}""",
    ),
    Offer(
        "compare",
        compare_request,
        f"""**One recipe, a run for every combination of a grid of values.** The grid is a JSON object of dotted fields
with the values to try: `{{"train.optim.lr": [0.001, 0.003], "train.seed": [0, 1]}}` is four runs. All are checked
before the first starts, stages that they share are made once, and one that fails does not stop the others. At the end
there is a table of all runs, and a link to MLflow's page that compares them.
{_HOW}""",
    ),
)


def register(
    root: StorePath, pool: str = POOL, *, max_runs: int | None = None, command: str | None = None
) -> list[str]:
    """Register every deployment with the server of PREFECT_API_URL; again for one that is there brings it up to date.

    What belongs to people stays as it is: schedules, switched on or edited, default parameters, tags, pauses.

    Args:
        root: that the pool's workers serve; it is checked here, and reaches them by their environment alone.
        pool: a process work pool; made where there is none.
        max_runs: flow runs of the pool at a time; None: as it is.
        command: what workers start for a flow run; None: they find out.

    Returns:
        the full names, "flow/deployment".
    """
    absolute(root)
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        if max_runs is not None:
            client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=max_runs))
        return [_register(client, offer, pool, command) for offer in OFFERS]


def make_deployment(offer: Offer, pool: str, command: str | None = None) -> RunnerDeployment:
    """The deployment as Prefect registers it; its entrypoint is a module, so a worker needs nothing but athanor."""
    schedules = None
    if offer.cron:
        every_night = CronSchedule(cron=offer.cron, timezone="UTC")
        schedules = [DeploymentScheduleCreate(schedule=every_night, active=False, slug="nightly")]
    return offer.flow.to_deployment(
        name=offer.name,
        schedules=schedules,
        concurrency_limit=_limit(offer),
        description=_LINE_BREAK.sub(" ", offer.about.strip()),
        tags=["athanor"],
        version=importlib.metadata.version("athanor"),
        enforce_parameter_schema=True,
        work_pool_name=pool,
        job_variables={"command": command} if command else None,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _limit(offer: Offer) -> ConcurrencyLimitConfig | None:
    if offer.limit is None:
        return None
    strategy = ConcurrencyLimitStrategy.CANCEL_NEW if offer.cron else ConcurrencyLimitStrategy.ENQUEUE
    return ConcurrencyLimitConfig(limit=offer.limit, collision_strategy=strategy)


def _register(client: SyncPrefectClient, offer: Offer, pool: str, command: str | None) -> str:
    deployment = make_deployment(offer, pool, command)
    full_name = f"{deployment.flow_name}/{offer.name}"
    try:
        there = client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        deployment.apply()
        return full_name
    # Registering a second time would put the schedules back; an update of the rest leaves them alone.
    fresh: dict[str, Any] = {
        "version": deployment.version,
        "description": deployment.description,
        "entrypoint": deployment.entrypoint,
        "parameter_openapi_schema": deployment._parameter_openapi_schema.model_dump(),
        "enforce_parameter_schema": True,
        "work_pool_name": pool,
        "job_variables": {**(there.job_variables or {}), **({"command": command} if command else {})},
    }
    try:
        client.update_deployment(there.id, DeploymentUpdate(**fresh))
    except PrefectHTTPStatusError as error:
        reason = " ".join(str(error.response.json().get("detail")).split())
        log.warning(
            "deployment %s keeps default parameters that no longer fit: %s; edit them in the UI", full_name, reason
        )
    return full_name


def main(argv: list[str] | None = None) -> int:
    """Register with the server of PREFECT_API_URL, and say how to start a worker."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployments", description=__doc__)
    parser.add_argument("--root", default=DEFAULT_ROOT, help="directory for everything (%(default)s)")
    parser.add_argument("--pool", default=POOL, help="process work pool (%(default)s)")
    args = parser.parse_args(argv)
    try:
        if not os.environ.get("PREFECT_API_URL"):
            raise InputError("PREFECT_API_URL is not set: start `athanor up`, or a Prefect server and set its address")
        root = absolute(location(args.root))
        names = register(root, args.pool)
    except InputError as error:
        print(f"athanor: {error}", file=sys.stderr)
        return 2
    print(f"registered {', '.join(names)}")
    print(f"start workers: ATHANOR_ROOT={root} prefect worker start --pool {args.pool}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
