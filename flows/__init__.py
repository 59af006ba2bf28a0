"""The pipeline as Prefect flows: the order of the stages and how they run. The only package that imports prefect.

In: a recipe. Out: a pipeline run, in Prefect and in MLflow.
Read first: `pipeline/steps.py`, `pipeline/plan.py`, then `pipeline/flow.py`. The rooms import downwards: `cli/`,
`service/`, `pipeline/`, `tracking/`, and the private parts of libraries in `libraries/`.

The defaults below must be in the environment before prefect is imported, because prefect reads them only once. The
umask makes every file of a root private (see `service/access.py`); the processes that a flow starts
inherit it.
"""

import os

NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
}
_DEFAULTS = {
    **NO_TELEMETRY,
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # Prefect's own lines go to its server and UI; the command line prints its own.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_FLOW_RUNS_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_TASK_RUNS_LEVEL": "CRITICAL",
}
os.umask(0o077)
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)
