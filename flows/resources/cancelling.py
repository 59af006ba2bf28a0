"""Cancels the subflow runs of a cancelled flow run. Prefect does not do that, so they would stay "Running" for ever.

The worker sets the outermost flow run to Cancelled when its process has ended. This module must not do it earlier.
Otherwise a user could retry the run while the worker is still settling the previous try, and the retry would be
cancelled too.
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

CANCELLED = "cancelled; Retry resumes from the last checkpoint"
log = logging.getLogger("athanor.service")


@contextlib.contextmanager
def inner_run_cancelled() -> Iterator[None]:
    """Set the current subflow run to Cancelled if SIGTERM ends the block because the outermost run is cancelled."""
    try:
        yield
    except TerminationSignal:
        try:
            _settle()
        except httpx.HTTPError as error:  # the next start of the service settles the run
            log.warning("the flow run %s could not be set to Cancelled: %s", flow_run.id, error)
        raise


def _settle() -> None:
    inner, outer = flow_run.id, flow_run.root_flow_run_id
    if inner is None or str(inner) == str(outer):
        return
    with get_client(sync_client=True) as client:
        if client.read_flow_run(UUID(str(outer))).state.type == StateType.CANCELLING:
            client.set_flow_run_state(UUID(str(inner)), Cancelled(message=CANCELLED), force=True)
