"""Writes to one MLflow run, and keeps the part of its content that was read.

Everything may be added twice. Parameters and tags then have the same values. A metric has its time and step from a
file, so that MLflow's primary key keeps it only once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.tracking.store import connect  # noqa: F401  before mlflow: sets variables that mlflow reads at its import

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from pydantic import BaseModel

# MLflow's pages hide tags that begin with "mlflow.": only code reads these.
HIDDEN = "mlflow.athanor."
FINGERPRINT = f"{HIDDEN}fingerprint."  # and the name of a stage
TIMING = "timing/"  # like usage/ of system.py, this sorts after losses and scores
METRICS_PER_BATCH, ENTITIES_PER_BATCH = 1000, 100  # MLflow's limits
_MAX_PARAM, _MAX_TAG = 6000, 8000  # characters


class RunWriter:
    """A writer that adds to one MLflow run.

    Attributes:
        tags: tags of the run.
        status, end_ms: status and end of the run at the time when it was read.
        steps: name of a metric -> steps at which the run holds it, as far as they were read.
    """

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client, self.tags = client, dict(run.data.tags)
        self.run_id, self.experiment_id = run.info.run_id, run.info.experiment_id
        self.artifact_uri = run.info.artifact_uri
        self.name, self.status, self.end_ms = run.info.run_name, run.info.status, run.info.end_time
        self.steps: dict[str, set[int]] = {}

    @property
    def page(self) -> str:
        """The address of the run's page, relative to the server's."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def is_marked(self, what: str, fingerprint: str) -> bool:
        """Whether `mark` was called with the same arguments."""
        return self.tags.get(f"{HIDDEN}logged.{what}") == fingerprint

    def mark(self, what: str, fingerprint: str) -> None:
        """Mark that the run holds something completely. Must be called after all of it was added."""
        self.set_tags({f"{HIDDEN}logged.{what}": fingerprint})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set the tags whose values differ from the run's."""
        texts = {key: str(value)[:_MAX_TAG] for key, value in tags.items()}
        missing = [RunTag(key, text) for key, text in texts.items() if self.tags.get(key) != text]
        for start in range(0, len(missing), ENTITIES_PER_BATCH):
            self.client.log_batch(self.run_id, tags=missing[start : start + ENTITIES_PER_BATCH])
        self.tags |= texts

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Add parameters. Their values are cut to MLflow's limit."""
        entities = [Param(key, str(value)[:_MAX_PARAM]) for key, value in params.items()]
        for start in range(0, len(entities), ENTITIES_PER_BATCH):
            self.client.log_batch(self.run_id, params=entities[start : start + ENTITIES_PER_BATCH])

    def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Add points of metrics."""
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + METRICS_PER_BATCH])

    def log_rows(self, rows: Sequence[BaseModel], default_ms: int, metric: str) -> int:
        """Add the rows whose steps the run does not hold. Each row is sent in one call, so it arrives completely or
        not at all.

        Args:
            rows: models with the fields `step` and `time_ms`, and metrics as all other fields.
            default_ms: time for rows without a time, in milliseconds since 1970.
            metric: a metric of every row, whose steps in the run show which rows it holds.

        Returns:
            the number of rows that were added.
        """
        if not rows:
            return 0
        if metric not in self.steps:
            self.steps[metric] = {point.step for point in self.client.get_metric_history(self.run_id, metric)}
        missing = {row.step: row for row in rows if row.step not in self.steps[metric]}
        groups = []
        for row in missing.values():
            values = row.model_dump(exclude={"step", "time_ms"}, exclude_none=True)
            moment = row.time_ms or default_ms
            groups.append([Metric(metric_name(name), float(value), moment, row.step) for name, value in values.items()])
        rows_per_batch = METRICS_PER_BATCH // max(map(len, groups), default=1)
        for start in range(0, len(groups), rows_per_batch):
            batch = [point for group in groups[start : start + rows_per_batch] for point in group]
            self.client.log_batch(self.run_id, metrics=batch)
        self.steps[metric] |= missing.keys()
        return len(missing)


def metric_name(field: str) -> str:
    """Return the name under which MLflow gets a field of a row: seconds and TFLOP/s are in a section of their own."""
    return f"{TIMING}{field}" if field.endswith(("_seconds", "_tflops")) else field
