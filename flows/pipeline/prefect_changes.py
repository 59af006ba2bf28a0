"""Changes of Prefect for the flow runs of this process: one-line errors, no stored results, and a run that ends when a
person cancels or suspends it.

A worker sends SIGTERM to the process of a run that a person cancels. Prefect ends a suspended run only at its next
task, which may be hours away. So `suspendable` looks at the state of the run, and sends the signal itself. From then on
both go the same way: the trainer saves, and the run ends.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import FailedRun, ObjectNotFound, Pause, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Suspended

from dataset_builders.errors import InputError, first_line, printable
from flows.libraries.prefect_private import replace_result_readers
from flows.pipeline.limits import has_server

LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")

SUSPENDED = "suspended; Resume continues from the last checkpoint"
WATCH_SECONDS = 3.0  # between two looks at the state of a run; a worker looks for new runs as often
# States in which a run is not to run: suspended, or resumed or retried before the watch has seen that.
_NOT_RUNNING = (StateType.PAUSED, StateType.SCHEDULED, StateType.PENDING)
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


def cancelled_message(saved: str) -> str:
    """Return the message of a cancelled run.

    Args:
        saved: what its training has saved, as `step 215 saved`; may be empty.
    """
    return f"{saved}; Retry resumes from it" if saved else "cancelled; Retry resumes from the last checkpoint"


class _Suspension:
    """The state by which a person has suspended the outermost flow run of this process; None before."""

    state: State | None = None


_suspension = _Suspension()


def asked_to_stop() -> State | None:
    """Return the state by which a person stops the outermost flow run of this process, Cancelling or Suspended; None if
    nobody does, or if the server does not answer."""
    if _suspension.state is not None or not has_server():
        return _suspension.state
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.root_flow_run_id))).state
    except httpx.HTTPError as error:
        log.warning("Prefect's server does not say whether the run was cancelled: %s", error)
        return None
    return state if state is not None and state.type == StateType.CANCELLING else None


@contextlib.contextmanager
def stopped_as_asked() -> Iterator[None]:
    """End the current flow run as a person has asked for, if SIGTERM or Prefect's own Pause ends the block.

    A subflow run is set to Cancelled. Prefect does not do that, so it would stay "Running" for ever. A suspended run
    ends by Pause, which keeps its state. The worker sets the outermost run to Cancelled when its process has ended. It
    must not be done here: a user could then retry the run while the worker is still settling the previous try, and the
    retry would be cancelled too.
    """
    try:
        yield
    except (TerminationSignal, Pause) as error:
        asked = error.state if isinstance(error, Pause) else asked_to_stop()
        if asked is None:
            raise
        is_cancelled = asked.type == StateType.CANCELLING
        try:
            inner, outer = flow_run.id, flow_run.root_flow_run_id
            if inner is not None and str(inner) != str(outer):
                state = Cancelled(message=cancelled_message("") if is_cancelled else SUSPENDED)
                with get_client(sync_client=True) as client:
                    client.set_flow_run_state(UUID(str(inner)), state, force=True)
        except (httpx.HTTPError, ObjectNotFound) as problem:  # the next start of the service settles the run
            log.warning("the flow run %s could not be set to Cancelled: %s", flow_run.id, problem)
        if is_cancelled:
            raise
        raise Pause(state=asked) from None


@contextlib.contextmanager
def suspendable() -> Iterator[None]:
    """Let a person suspend or delete the current flow run, the outermost of this process, while the block lasts.

    The run then gets SIGTERM, as a cancelled run does, and ends by Prefect's Pause. A run that is paused, for which
    Prefect would keep the process, is suspended instead, so that Resume starts it again.
    """
    ended = threading.Event()
    if flow_run.id is not None:
        arguments = (UUID(str(flow_run.id)), ended)
        threading.Thread(target=_watch, args=arguments, name="suspendable", daemon=True).start()
    try:
        with stopped_as_asked():
            yield
    finally:
        ended.set()
        _suspension.state = None


def _watch(run: UUID, ended: threading.Event) -> None:
    while not ended.wait(WATCH_SECONDS):
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(run).state
                if state is None or state.type not in _NOT_RUNNING:
                    continue
                if state.type == StateType.PAUSED and not state.state_details.pause_reschedule:
                    state = Suspended(pause_expiration_time=state.state_details.pause_timeout)
                    client.set_flow_run_state(run, state, force=True)
        except ObjectNotFound:
            state = Suspended(message="deleted")
        except Exception:  # the server is away, or its answer was cut off; the next look tries again
            continue
        if not ended.is_set():
            log.warning("the flow run is %s: it saves and ends", state.message or state.name)
            _suspension.state = state
            os.kill(os.getpid(), signal.SIGTERM)
        return


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
