"""MLflow: one pipeline run is one MLflow run, whose content follows from the run's record and artifacts.

In: the run record, artifacts, metrics.jsonl. Out: the MLflow run, which is the same however often it is published.
Read first: `tracker.py`, then `record.py` and `publish.py`.
"""
