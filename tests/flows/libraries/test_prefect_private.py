"""Prefect's private parts are as `flows/libraries/prefect_private.py` expects them."""

import ast
import inspect

from prefect._internal import result_records
from prefect.deployments.runner import RunnerDeployment
from prefect.flow_engine import load_flow
from prefect.workers.process import ProcessWorker

from flows.libraries.prefect_private import ENTRYPOINT_VARIABLE
from tests.helpers.private_parts import changed, differing, report

RECORDED = {
    "prefect.results:ResultRecord.deserialize": ["data", "backup_serializer=None"],
    "prefect.results:ResultRecord.deserialize_from_result_and_metadata": ["result", "metadata"],
    "prefect.workers.process:load_flow_from_flow_run": [
        *("client", "flow_run", "ignore_storage=False", "storage_base_path=None", "use_placeholder_flow=True"),
    ],
    "prefect.workers.process:ProcessWorker.run": ["self", "flow_run", "configuration", "task_status=None"],
    "prefect.workers.process:ProcessJobConfiguration.from_template_and_values": [
        *("base_job_template", "values", "client=None"),
    ],
}
SCHEMA, LOADER, VARIABLE = {"_parameter_openapi_schema"}, {"load_flow_from_flow_run"}, {ENTRYPOINT_VARIABLE}
UNPICKLING = {"deserialize", "deserialize_from_result_and_metadata"}  # the methods that are replaced


def functions_that_unpickle() -> set[str]:
    functions = [n for n in ast.walk(ast.parse(inspect.getsource(result_records))) if isinstance(n, ast.FunctionDef)]
    return {function.name for function in functions if ".loads(" in ast.unparse(function)}


def test_prefects_private_parts():
    report(
        "prefect",
        changed(RECORDED),
        differing("the unpickling of stored results", functions_that_unpickle(), UNPICKLING),
        differing("RunnerDeployment", RunnerDeployment.__private_attributes__.keys() & SCHEMA, SCHEMA),
        differing("ProcessWorker.run", {*ProcessWorker.run.__code__.co_names} & LOADER, LOADER),
        differing("flow_engine.load_flow", {*load_flow.__code__.co_consts} & VARIABLE, VARIABLE),
    )
