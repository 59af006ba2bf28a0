"""The private parts of Prefect that athanor uses, as they are in Prefect 3.8.8.

- `ResultRecord.deserialize` and `deserialize_from_result_and_metadata` are replaced: only these two methods turn the
  bytes of a stored result into an object.
- `load_flow_from_flow_run` is replaced in the module of the process worker, which calls it for the hooks of a run.
- `StateProposer.propose_cancelled` is replaced: a worker calls it with the message of a run that it has cancelled.
- The engine reads the entrypoint of its flow from an environment variable.
- A RunnerDeployment holds the schema of its parameters.
- The table of concurrency limits in Prefect's database has the number of slots in use.

`tests/flows/libraries/test_prefect_private.py` compares them with the installed Prefect.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

from prefect.results import ResultRecord

from dataset_builders.known_version import check_version

KNOWN = "==3.8.8"
check_version("prefect", KNOWN, __name__, "a stored result or a deployment's hook could run any code", refuses=True)

# Prefect's engine loads the flow of this variable instead of the deployment's.
ENTRYPOINT_VARIABLE = "PREFECT__FLOW_ENTRYPOINT"


def replace_result_readers(read: Callable[..., Any]) -> None:
    """Make Prefect call `read` in this process where it would turn the bytes of a stored result into an object."""
    ResultRecord.deserialize = read
    ResultRecord.deserialize_from_result_and_metadata = read


def free_slots(database: Path) -> None:
    """Free all slots of concurrency limits in a SQLite database that is a copy: nobody holds a slot there, and Prefect
    would keep them for ever, because the leases that end them are files beside the database."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'concurrency_limit_v2'").fetchone():
            connection.execute("UPDATE concurrency_limit_v2 SET active_slots = 0")


def replace_flow_loader(worker_module: ModuleType, load: Callable[..., Any]) -> None:
    """Make the process worker get the flow of an ended run, for its hooks, from `load`.

    Args:
        worker_module: prefect.workers.process; a parameter, because processes of flows have no need to import it.
    """
    worker_module.load_flow_from_flow_run = load


def replace_cancelled_message(message_of: Callable[[UUID], str | None]) -> None:
    """Make this process's worker give a cancelled run the message of `message_of`, which gets the run's id when its
    process has ended; None keeps Prefect's message."""
    from prefect.runner._state_proposer import StateProposer  # only a worker has a use for it

    propose = StateProposer.propose_cancelled

    async def propose_cancelled(self: Any, flow_run: Any, state_updates: dict[str, Any] | None = None) -> bool:
        updates = dict(state_updates or {})
        if (message := message_of(flow_run.id)) is not None:
            updates["message"] = message
        return await propose(self, flow_run, updates)

    StateProposer.propose_cancelled = propose_cancelled


def parameter_schema(deployment: Any) -> dict[str, Any]:
    """Return the schema of the parameters of a RunnerDeployment."""
    return deployment._parameter_openapi_schema.model_dump()
