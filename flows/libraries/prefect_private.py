"""The private parts of Prefect that athanor uses, as they are in Prefect 3.8.8.

- `ResultRecord.deserialize` and `deserialize_from_result_and_metadata` are replaced: only these two methods turn the
  bytes of a stored result into an object.
- `load_flow_from_flow_run` is replaced in the module of the process worker, which calls it for the hooks of a run.
- `StateProposer.propose_cancelled` is replaced: a worker calls it with the message of a run that it has cancelled.
- The engine reads the entrypoint of its flow from an environment variable.
- A RunnerDeployment holds the schema of its parameters.
- Tables of Prefect's database have the number of slots in use, and the states of flow runs and task runs.

`tests/flows/libraries/test_prefect_private.py` compares them with the installed Prefect.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

from prefect.results import ResultRecord

from dataset_builders.known_version import check_version

KNOWN = "==3.8.8"
check_version("prefect", KNOWN, __name__, "a stored result or a deployment's hook could run any code", refuses=True)

# Prefect's engine loads the flow of this variable instead of the deployment's.
ENTRYPOINT_VARIABLE = "PREFECT__FLOW_ENTRYPOINT"
OPEN_TABLES = ("flow_run", "task_run")  # each beside a table of its states


def replace_result_readers(read: Callable[..., Any]) -> None:
    """Make Prefect call `read` in this process where it would turn the bytes of a stored result into an object."""
    ResultRecord.deserialize = read
    ResultRecord.deserialize_from_result_and_metadata = read


def make_idle(database: Path, message: str) -> None:
    """Make a SQLite database that is a copy one of a server on which nothing goes on.

    Its open flow runs and task runs become Crashed with a message, or Cancelled if a person was cancelling them: their
    processes do not know the copy, and only the host of a process could tell that it has ended. All slots of
    concurrency limits are free, which Prefect would keep for ever, because the leases that end them are files beside
    the database.
    """
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "concurrency_limit_v2" not in tables:  # the first start was interrupted before it made the tables
            return
        connection.execute("UPDATE concurrency_limit_v2 SET active_slots = 0")
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        for table in OPEN_TABLES:
            query = f"SELECT id, state_type FROM {table} WHERE state_type IN ('RUNNING', 'PENDING', 'CANCELLING')"
            for run, before in connection.execute(query).fetchall():
                state, name = str(uuid4()), "CANCELLED" if before == "CANCELLING" else "CRASHED"
                connection.execute(
                    f"INSERT INTO {table}_state (id, timestamp, type, name, message, {table}_id) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (state, now, name, name.title(), message, run),
                )
                connection.execute(
                    f"UPDATE {table} SET state_id = ?, state_timestamp = ?, state_type = ?, state_name = ?, "
                    "end_time = ? WHERE id = ?",
                    (state, now, name, name.title(), now, run),
                )


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
