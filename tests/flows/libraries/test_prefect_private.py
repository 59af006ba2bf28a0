"""Prefect's private parts are as `flows/libraries/prefect_private.py` expects them."""

import ast
import inspect
from collections.abc import Iterator

from tests.helpers.private_parts import changed, differing, fail_if_changed, unmentioned

RECORDED = {
    "prefect.results:ResultRecord.deserialize": ["data", "backup_serializer=None"],
    "prefect.results:ResultRecord.deserialize_from_result_and_metadata": ["result", "metadata"],
    "prefect.workers.process:load_flow_from_flow_run": [
        *("client", "flow_run", "ignore_storage=False", "storage_base_path=None", "use_placeholder_flow=True"),
    ],
    "prefect.runner._state_proposer:StateProposer.propose_cancelled": ["self", "flow_run", "state_updates=None"],
    "prefect.workers.process:ProcessWorker.run": ["self", "flow_run", "configuration", "task_status=None"],
    "prefect.workers.process:ProcessJobConfiguration.from_template_and_values": [
        *("base_job_template", "values", "client=None"),
    ],
}
SCHEMA = {"_parameter_openapi_schema"}
UNPICKLING = {"deserialize", "deserialize_from_result_and_metadata"}  # the methods that are replaced


def changes() -> Iterator[str]:
    yield from changed(RECORDED)
    from prefect._internal import result_records
    from prefect.deployments.runner import RunnerDeployment
    from prefect.flow_engine import load_flow
    from prefect.server.database.orm_models import Base
    from prefect.workers.process import ProcessWorker

    from flows.libraries.prefect_private import ENTRYPOINT_VARIABLE, OPEN_TABLES

    functions = [n for n in ast.walk(ast.parse(inspect.getsource(result_records))) if isinstance(n, ast.FunctionDef)]
    unpickling = {function.name for function in functions if ".loads(" in ast.unparse(function)}
    yield from differing("the unpickling of stored results", unpickling, UNPICKLING)
    yield from differing("RunnerDeployment", RunnerDeployment.__private_attributes__.keys() & SCHEMA, SCHEMA)
    columns = set(Base.metadata.tables["concurrency_limit_v2"].columns.keys())
    yield from differing("concurrency_limit_v2", columns & {"active_slots"}, {"active_slots"})
    for name in OPEN_TABLES:
        columns, state = (Base.metadata.tables[table].columns for table in (name, f"{name}_state"))
        used = {"id", "state_id", "state_timestamp", "state_type", "state_name", "end_time"}
        yield from differing(name, used & set(columns.keys()), used)
        used = {"id", "timestamp", "type", "name", "message", f"{name}_id"}
        yield from differing(f"{name}_state", used & set(state.keys()), used)
        needed = {column.name for column in state if not column.nullable and column.server_default is None}
        yield from differing(f"columns of {name}_state without a default", needed - used, set())
    yield from unmentioned(ProcessWorker.run, "load_flow_from_flow_run")
    yield from unmentioned(load_flow, ENTRYPOINT_VARIABLE)


def test_prefects_private_parts():
    fail_if_changed("prefect", __name__)
