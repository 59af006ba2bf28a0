"""MLflow: one pipeline run is one MLflow run, whose content follows from the run's record and artifacts.

In: the run record, artifacts, metrics.jsonl. Out: the MLflow run, which is the same however often it is published.
Read first: `tracker.py`, then `record.py`, `publish.py` and `parts.py`.

The defaults below must be in the environment before mlflow is imported, because mlflow reads them at its import.
"""

import os

_DEFAULTS = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    # The sending thread tries again itself, after it has checked whether the last try arrived. MLflow's client would
    # repeat a request without that check.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "180",  # long, since no other thread waits for the sending thread
}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)
