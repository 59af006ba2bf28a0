"""Cancels the flow runs within a cancelled flow run: Prefect forgets them, and they would stay "Running" for ever.

The worker sets the outermost one to Cancelled when its process has ended. If that happened here, sooner, a person could
retry the run while the worker still settles the try before, and the retry would be cancelled too.
"""

import contextlib
import logging
from collections.abc import Iterator
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

CANCELLED = "cancelled; Retry goes on from the last checkpoint"
log = logging.getLogger("athanor.service")


@contextlib.contextmanager
def inner_run_cancelled() -> Iterator[None]:
    """Around the work of a task: if SIGTERM ends it in a flow run within a cancelled one, set that to Cancelled."""
    try:
        yield
    except TerminationSignal:
        try:
            _settle()
        except httpx.HTTPError as error:  # the next start settles it
            log.warning("the flow run %s could not be set to Cancelled: %s", flow_run.id, error)
        raise


def _settle() -> None:
    inner, outer = flow_run.id, flow_run.root_flow_run_id
    if inner is None or str(inner) == str(outer):
        return
    with get_client(sync_client=True) as client:
        if client.read_flow_run(UUID(str(outer))).state.type == StateType.CANCELLING:
            client.set_flow_run_state(UUID(str(inner)), Cancelled(message=CANCELLED), force=True)
