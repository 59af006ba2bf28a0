"""Writes to one MLflow run: tags, parameters, metrics and files, each only if the run lacks it.

Everything may be added twice. Parameters and tags then have the same values. A metric has its time and step from a
file, so that MLflow's primary key keeps it only once. A file that MLflow already lists with the same size is not sent
again.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlparse

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from dataset_builders.storage.store import StorePath, is_local, local_copy, walk_files
from flows.tracking.config import ArtifactLevel
from flows.tracking.servers import FILES_VARIABLE
from stages.shared.artifacts.artifact import Artifact
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT, PROFILE

# MLflow's pages hide tags that begin with "mlflow.": only code reads these.
HIDDEN = "mlflow.athanor."
FINGERPRINT = f"{HIDDEN}fingerprint."  # and the name of a stage
TIMING = "timing/"  # like usage/ of system.py, this sorts after losses and scores
MAX_POINTS = 1000  # about this many points of a metric; MLflow's charts are slow with more
METRICS_PER_BATCH, ENTITIES_PER_BATCH = 1000, 100  # MLflow's limits
_MAX_PARAM, _MAX_TAG = 6000, 8000  # characters

REFERENCES = "references.json"
SMALL_BYTES = 64 * 2**20  # largest size of one small file
_SLOWEST = 10e6  # bytes per second; a slower upload is given up
_SMALL_FOLDERS = ("", "logs", PROFILE, HF_EXPORT, ADAPTER_EXPORT)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class RunWriter:
    """A writer that adds to one MLflow run.

    Attributes:
        status, end_ms: status and end of the run at the time when it was read.
        steps: name of a metric -> steps at which the run holds it, as far as they were read.
    """

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client, self.tags = client, dict(run.data.tags)
        self.run_id, self.experiment_id = run.info.run_id, run.info.experiment_id
        self.artifact_uri = run.info.artifact_uri
        self.status, self.end_ms = run.info.status, run.info.end_time
        self.steps: dict[str, set[int]] = {}

    @property
    def page(self) -> str:
        """The address of the run's page, relative to the server's."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set the tags whose values differ from the run's."""
        texts = {key: str(value)[:_MAX_TAG] for key, value in tags.items()}
        self._log("tags", [RunTag(key, text) for key, text in texts.items() if self.tags.get(key) != text])
        self.tags |= texts

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Add parameters. Their values are cut to MLflow's limit."""
        self._log("params", [Param(key, str(value)[:_MAX_PARAM]) for key, value in params.items()])

    def log_metrics(self, values: Mapping[str, float], moment: int, step: int = 0, **about: str) -> None:
        """Add one point of each metric.

        Args:
            moment: time of the points, in milliseconds since 1970.
            about: the model and the dataset of the points.
        """
        self._log("metrics", [Metric(name, value, moment, step, **about) for name, value in values.items()])

    def _log(self, kind: str, entities: Sequence[object]) -> None:
        size = METRICS_PER_BATCH if kind == "metrics" else ENTITIES_PER_BATCH
        for start in range(0, len(entities), size):
            self.client.log_batch(self.run_id, **{kind: entities[start : start + size]})

    def log_rows(self, rows: Iterable[Mapping[str, Any]], default_ms: int, metric: str) -> int:
        """Add the rows whose steps the run does not hold. Each row is sent in one call, so it arrives completely or
        not at all.

        Args:
            rows: a `step` and a `time_ms` each; all other values are metrics.
            default_ms: time for rows without a time, in milliseconds since 1970.
            metric: a metric of every row, whose steps in the run show which rows it holds.

        Returns:
            the number of rows that were added.
        """
        by_step = {row["step"]: row for row in rows}
        if by_step and metric not in self.steps:
            self.steps[metric] = {point.step for point in self.client.get_metric_history(self.run_id, metric)}
        missing = [row for step, row in by_step.items() if step not in self.steps[metric]]
        groups = []
        for row in missing:
            values = {name: value for name, value in row.items() if name not in ("step", "time_ms")}
            moment = row.get("time_ms") or default_ms
            points = {metric_name(name): float(value) for name, value in values.items() if value is not None}
            groups.append([Metric(name, value, moment, row["step"]) for name, value in points.items()])
        rows_per_batch = METRICS_PER_BATCH // max(map(len, groups), default=1)
        for start in range(0, len(groups), rows_per_batch):
            batch = [point for group in groups[start : start + rows_per_batch] for point in group]
            self.client.log_batch(self.run_id, metrics=batch)
        for row in missing:
            self.steps[metric].add(row["step"])
        return len(missing)


def thinned(rows: Iterable[Mapping[str, Any]], num_steps: int, before: int = 0) -> list[Mapping[str, Any]]:
    """Return the rows of a training that MLflow gets, about MAX_POINTS of them: the first, the last, those with a
    held-out loss, and the first at or after each multiple of ceil(num_steps / MAX_POINTS) steps.

    Args:
        rows: a `step` each, in the order of the file.
        num_steps: number of steps of the whole training.
        before: step of the row before these; 0: there is none.
    """
    every, chosen = -(-num_steps // MAX_POINTS), []
    for row in rows:
        step = row["step"]
        is_due = before == 0 or step // every > before // every
        if is_due or step == num_steps or row.get("heldout_loss") is not None:
            chosen.append(row)
        before = step
    return chosen


def metric_name(field: str) -> str:
    """Return the name under which MLflow gets a field of a row: seconds and TFLOP/s are in a section of their own."""
    return f"{TIMING}{field}" if field.endswith(("_seconds", "_tflops")) else field


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A place for files in MLflow: the artifacts of a run, or the files of a logged model."""

    address: str
    list_folder: Callable[[str | None], Any]  # None is the place itself
    upload: Callable[[str, str | None], None]  # gets a file of this machine, and a folder

    @classmethod
    def of_run(cls, writer: RunWriter) -> "FilePlace":
        client, run_id = writer.client, writer.run_id
        return cls(writer.artifact_uri, partial(client.list_artifacts, run_id), partial(client.log_artifact, run_id))

    @classmethod
    def of_model(cls, client: MlflowClient, model_id: str) -> "FilePlace":
        address = client.get_logged_model(model_id).artifact_location
        lists, uploads = client.list_logged_model_artifacts, client.log_model_artifact
        return cls(address, partial(lists, model_id), partial(uploads, model_id))

    def local_dir(self) -> Path | None:
        """Return the place's directory on this machine; None if it is elsewhere."""
        parts = urlparse(self.address)
        if parts.scheme == "mlflow-artifacts" and (files := os.environ.get(FILES_VARIABLE)):
            return Path(files, parts.path.lstrip("/"))
        return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None

    def send(
        self,
        directory: StorePath,
        sizes: Mapping[str, int],
        folder: str,
        before: Callable[[float], None],
        may_upload: bool = True,
    ) -> int | None:
        """Send the files of a directory that the place lacks. If MLflow keeps its files on this machine, a file is
        hard-linked where the file system allows that.

        Args:
            sizes: name below the directory -> bytes, for each file to send.
            folder: folder of the place in which the files get these names; "" is the place itself.
            before: function that is called before an upload with the seconds for which MLflow may not answer.

        Returns:
            the number of files that were sent; None if a file cannot be linked and `may_upload` is False.
        """
        paths = {name: PurePosixPath(folder, name) for name in sizes}
        folders = {name: None if str(path.parent) == "." else str(path.parent) for name, path in paths.items()}
        listed = {item.path: item.file_size for each in {*folders.values()} for item in self.list_folder(each)}
        lacking, here = [name for name in sizes if listed.get(str(paths[name])) != sizes[name]], self.local_dir()
        for name in lacking:
            if here is not None and _link(directory / name, here / paths[name]):
                continue
            if not may_upload:
                return None
            before(sizes[name] / _SLOWEST)
            self.upload(str(local_copy(directory / name)), folders[name])
        return len(lacking)


def _link(source: StorePath, target: Path) -> bool:
    """Hard-link a file that never changes. Return False if it is in a store or the file system cannot link it."""
    if not is_local(source):
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.link(source.resolve(), target)
    except OSError:
        return False
    return True


def sizes_of(directory: StorePath) -> dict[str, int]:
    """Return name below the directory -> bytes for every file in it. A directory in a store is listed with one call."""
    if is_local(directory):
        return {str(file.relative_to(directory)): file.stat().st_size for file in walk_files(directory)}
    start, found = f"{directory.path.rstrip('/')}/", directory.fs.find(directory.path, detail=True)
    return {name.removeprefix(start): entry["size"] for name, entry in sorted(found.items())}


def chosen_files(artifact: Artifact, level: ArtifactLevel, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the files that are uploaded to MLflow as they are: all, or small ones, or only pages."""

    def is_small(name: PurePosixPath, size: int) -> bool:
        folder = "" if len(name.parts) == 1 else name.parts[0]
        return folder in _SMALL_FOLDERS and name.suffix not in _WEIGHTS and size <= SMALL_BYTES

    if level == "all":
        return list(sizes)
    chosen = {name for name in artifact.shown_files() if name in sizes}
    if level == "small":
        chosen |= {name for name, size in sizes.items() if is_small(PurePosixPath(name), size)}
    return sorted(chosen)


def references(artifact: Artifact, place: str, sizes: Mapping[str, int], chosen: Collection[str]) -> str:
    """Return the text of references.json: the files of the artifact at `place` that are not uploaded, each with its
    size, and with its SHA-256 if the manifest has it."""
    digests = {entry.name: entry.sha256 for entry in (*artifact.manifest.shards, *artifact.manifest.files)}
    left = {name: {"bytes": sizes[name], "sha256": digests.get(name)} for name in sorted(sizes.keys() - set(chosen))}
    return json.dumps({"directory": place, "files": left}, indent=1) + "\n"
