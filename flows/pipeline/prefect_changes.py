"""Changes of Prefect for the flow runs of this process: one-line errors, cancelled subflow runs, no stored results."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NoReturn
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import FailedRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from dataset_builders.errors import InputError, first_line, printable
from flows.libraries.prefect_private import replace_result_readers

LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")

CANCELLED = "cancelled; Retry resumes from the last checkpoint"
log = logging.getLogger("athanor.service")


class OneLine(logging.Filter):
    """A filter that replaces a record of an InputError, or of a failed state's message, by its one line. Prefect would
    add a traceback of its own code."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, InputError | FailedRun):
            record.msg, record.args, record.exc_info, record.exc_text = printable(first_line(error)), (), None, None
        return True


def shorten_errors() -> None:
    """Filter the records of this process's flow and task runs."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, OneLine) for each in logger.filters):
            logger.addFilter(OneLine())


@contextlib.contextmanager
def inner_run_cancelled() -> Iterator[None]:
    """Set the current subflow run to Cancelled if SIGTERM ends the block because the outermost run is cancelled.

    Prefect does not do that, so the subflow run would stay "Running" for ever. The worker sets the outermost run to
    Cancelled when its process has ended. It must not be done here: a user could then retry the run while the worker is
    still settling the previous try, and the retry would be cancelled too.
    """
    try:
        yield
    except TerminationSignal:
        inner, outer = flow_run.id, flow_run.root_flow_run_id
        try:
            if inner is not None and str(inner) != str(outer):
                with get_client(sync_client=True) as client:
                    if client.read_flow_run(UUID(str(outer))).state.type == StateType.CANCELLING:
                        client.set_flow_run_state(UUID(str(inner)), Cancelled(message=CANCELLED), force=True)
        except httpx.HTTPError as error:  # the next start of the service settles the run
            log.warning("the flow run %s could not be set to Cancelled: %s", flow_run.id, error)
        raise


def refuse_stored_results() -> None:
    """Make Prefect refuse stored results in this process.

    A stored result is a pickle at an address that anybody may choose: whoever may call Prefect's API may set the state
    of a run, and the state may name a stored result. The process of the run would unpickle that result at its end, and
    so run any code in it. Athanor itself stores no results (tests/test_security.py).
    """

    def refuse(*_args: Any, **_values: Any) -> NoReturn:
        raise InputError(
            "a state of this run names a stored result; athanor stores none and reads none, so it was set by hand"
        )

    replace_result_readers(refuse)
