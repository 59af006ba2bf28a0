"""The worker of a service: Prefect's process worker, restricted to the flows that this service offers.

Whoever may call Prefect's API may create deployments with other code, give a run a command or environment variables,
and change the work pool. This worker uses only the name of the deployment. The command and the entrypoint are set here.
Any other difference from the registration by `deployments.py` is refused, with a line in the run's state.
"""

import inspect
import logging
import os
import shlex
import sys
from typing import Any, ClassVar, Self
from uuid import UUID

import anyio.to_thread
from prefect import Flow
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.workers import process

from dataset_builders.errors import InputError
from dataset_builders.storage.row_objects import DATA_STORES_VARIABLE
from flows.libraries.prefect_private import ENTRYPOINT_VARIABLE, replace_cancelled_message, replace_flow_loader
from flows.pipeline.prefect_changes import cancelled_message
from flows.pipeline.run_record import take_saved
from flows.service.deployments import JOB_TEMPLATE, OFFERS, refusal
from flows.service.reconcile import reconcile
from flows.service.request import service_root
from flows.service.schedules import WAY_OUT, check_parameters

TYPE = "athanor"  # for `prefect worker start --type`; the pool's own type is `process`
_WAY_OUT = "restart athanor's worker, which registers everything again"
log = logging.getLogger("athanor.service")


class ClosedConfiguration(process.ProcessJobConfiguration):
    """The job of a flow run, which ignores the settings of the pool's template, the deployment and the run."""

    @classmethod
    async def from_template_and_values(cls, *_args: Any, **_values: Any) -> Self:
        """Return the fixed job. Prefect calls this method to merge the template, the deployment and the run."""
        # Prefect's default command would first look for a workspace, in two more processes.
        return cls(command=shlex.join([sys.executable, "-m", "flows.service.engine", str(os.getpid())]))


class ClosedWorker(process.ProcessWorker):
    """A worker that runs only the flows of `OFFERS`, and settles the runs of dead processes.

    Attributes:
        active: ids of the flow runs of this process's worker. It settles them by itself.
    """

    job_configuration = ClosedConfiguration
    active: ClassVar[set[UUID]] = set()

    @classmethod
    def __dispatch_key__(cls) -> str:
        return TYPE

    async def sync_with_backend(self) -> None:
        """Send a heartbeat, as Prefect's worker does before it takes flow runs and then every few seconds. Settle the
        runs that killed processes have left since the last one."""
        await super().sync_with_backend()
        try:
            await anyio.to_thread.run_sync(reconcile, service_root(), self.name, frozenset(self.active))
        except Exception as error:  # the next heartbeat tries again; no error of it may end the worker
            log.warning("flow runs of dead processes could not be settled: %s", error)

    async def run(self, flow_run: FlowRun, configuration: ClosedConfiguration, task_status: Any = None) -> Any:
        """Run a flow run as Prefect's process worker does, unless its flow cannot be called with its parameters.

        Raises:
            InputError: the run, its deployment or the pool differs from what was registered.
        """
        deployment = None
        if flow_run.deployment_id:
            deployment = await self.client.read_deployment(flow_run.deployment_id)
        # Set even if it is empty: the rows of a request may name no store then.
        configuration.env[DATA_STORES_VARIABLE] = os.environ.get(DATA_STORES_VARIABLE, "")
        configuration.env[ENTRYPOINT_VARIABLE] = entrypoint_to_run(flow_run, deployment, self.work_pool)
        try:
            check_parameters(flow_run.parameters, flow_parameters(deployment.name))
        except InputError as error:  # else the process would end before the flow, and its log alone would say why
            await self.client.set_flow_run_state(flow_run.id, refusal(error, WAY_OUT), force=True)
            if task_status is not None:
                task_status.started(error)
            return process.ProcessWorkerResult(status_code=0, identifier=str(flow_run.id))
        self.active.add(flow_run.id)
        try:
            return await super().run(flow_run, configuration, task_status)
        finally:
            self.active.discard(flow_run.id)


def entrypoint_to_run(flow_run: FlowRun, deployment: DeploymentResponse | None, pool: WorkPool) -> str:
    """Return the module path of the flow that a run asks for.

    Raises:
        InputError: the run, its deployment or the pool differs from what was registered.
    """
    entrypoints = {offer.name: f"{offer.flow.fn.__module__}.{offer.flow.fn.__name__}" for offer in OFFERS}
    if deployment is None or deployment.name not in entrypoints:
        name = deployment.name if deployment else "none"
        raise InputError(f"deployment {name} is not athanor's, nothing was run; one of {', '.join(entrypoints)}")
    if flow_run.job_variables:
        names = ", ".join(sorted(flow_run.job_variables))
        raise InputError(f"the run sets job variables ({names}), which no request may; leave them out")
    entrypoint = entrypoints[deployment.name]
    registered = {"entrypoint": entrypoint, "pull_steps": None, "storage_document_id": None, "job_variables": None}
    for field, value in registered.items():
        if (found := getattr(deployment, field) or None) != value:
            raise InputError(f"deployment {deployment.name}: {field}={found!r} is not as registered; {_WAY_OUT}")
    if pool.base_job_template != JOB_TEMPLATE:
        raise InputError(f"work pool {pool.name}: its job template is not as registered; {_WAY_OUT}")
    return entrypoint


def flow_parameters(deployment: str) -> list[str]:
    """Return the names of the parameters of the flow that a deployment of `OFFERS` runs."""
    (offer,) = (offer for offer in OFFERS if offer.name == deployment)
    return list(inspect.signature(offer.flow.fn).parameters)


async def _without_hooks(_flow_run: FlowRun) -> Flow:
    return OFFERS[0].flow


# At the end of a run, Prefect's worker would import the flow that the deployment names at that time, and run its hooks.
# Athanor's flows have no hooks.
replace_flow_loader(process, _without_hooks)


def saved_message(flow_run: UUID) -> str | None:
    """Return the message of a cancelled flow run of this worker; None for Prefect's own, if no training has saved."""
    saved = take_saved(service_root(), str(flow_run))
    return cancelled_message(saved) if saved else None


replace_cancelled_message(saved_message)
