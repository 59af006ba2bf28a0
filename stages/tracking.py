"""MLflow: one pipeline run is one MLflow run. The only file that imports mlflow.

Tracking is a listener: a call that fails is logged and counted in `Tracker.problems`, and the pipeline goes on. Every
call may be repeated: a stage, a metric or a model that the run already holds is not logged twice.
"""

import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a dead server must not hold the pipeline for minutes
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

import filelock
import mlflow
import pyarrow.compute as pc
import pyarrow.parquet as pq
from mlflow import MlflowClient
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.data.sources import LocalArtifactDatasetSource
from mlflow.entities import DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.store import StorePath, absolute, is_local, local_copy, side_dir
from stages.artifact import Artifact
from stages.metrics_sink import MetricsSink
from stages.preview import PreviewOptions, render_preview
from stages.preview_target import Target
from stages.report import REPORT_HTML, REPORT_JSON
from trainer.contract import HF_EXPORT, MetricsRow, read_metrics

IDENTITY_TAG = "athanor.identity"
PREDICTIONS_TABLE = "predictions.json"
MAX_PREDICTIONS = 64
PREVIEW_HTML = "preview.html"
_PREVIEW_SAMPLES = 12
_DATASETS = {"embedded_data": "raw", "convert": "samples", "tokenize": "training", "plan_bins": "training"}
_METRICS_A_BATCH = 1000
_TEXT_ONLY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)  # a white pixel, for answers without a picture: a table's image column must have one in every row
log = logging.getLogger("athanor.tracking")


def tracking_uri(root: StorePath) -> str:
    """Where runs go: MLFLOW_TRACKING_URI if it is set, else SQLite in the root (of a store: on this machine)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(side_dir(root) / 'mlflow.db').resolve()}"


def server_command(root: StorePath, program: str = "mlflow") -> str:
    """What a person types to look at the runs of a root."""
    return f"{program} server --backend-store-uri {tracking_uri(root)} --host 127.0.0.1 --port 5000"


def server_url(root: StorePath) -> str:
    """Where pages are: the server of MLFLOW_TRACKING_URI, or the one that `server_command` starts."""
    uri = tracking_uri(root)
    return uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"


def compare_url(run_ids: Sequence[str], experiment_id: str, base: str) -> str:
    """MLflow's page that sets runs side by side; they differ in their names and in the marked parameters."""
    runs, experiments = quote(json.dumps(list(run_ids))), quote(json.dumps([experiment_id]))
    return f"{base}/#/compare-runs?runs={runs}&experiments={experiments}"


def run_name(recipe: str, differs: Mapping[str, object]) -> str:
    """`embedded lr=1e-05`: the recipe and what differs from it, by the shortest unambiguous field names."""
    last = [key.rpartition(".")[2] for key in differs]
    names = {key: short if last.count(short) == 1 else key for key, short in zip(differs, last)}
    return " ".join([recipe, *(f"{names[key]}={value}" for key, value in differs.items())])[:250]


def connect(root: StorePath) -> MlflowClient:
    """A client whose store has its schema. Two processes that make it at once would ruin a fresh SQLite file."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    uri = tracking_uri(root)
    side_dir(root).mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(side_dir(root) / "mlflow.db.lock", timeout=120):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


def guarded(method: Callable) -> Callable:
    """Tracking never raises into the pipeline: what goes wrong is logged and kept in `problems`."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            log.warning(
                "tracking: %s failed (%s: %s); the pipeline goes on", method.__name__, type(error).__name__, error
            )
            self.problems.append(f"{method.__name__}: {error}")
            return None

    return call


class Tracker:
    """One MLflow run. Without a connection (`run_id` is None) every call does nothing."""

    def __init__(self, root: StorePath, run_id: str | None) -> None:
        self.root, self.run_id, self.problems = root, run_id, []
        self.client: MlflowClient | None = None
        self.experiment_id = ""
        if run_id is not None:
            self._attach(run_id)

    @guarded
    def _attach(self, run_id: str) -> None:
        self.client = connect(self.root)
        self.experiment_id = self.client.get_run(run_id).info.experiment_id

    @guarded
    def log_stage(self, artifact: Artifact, reused: bool, hf_dir: Path | None = None) -> None:
        """Fingerprint, manifest, reports and preview of a stage; a dataset becomes an input of the run.

        Args:
            hf_dir: model directory whose tokenizer spells tokens in the preview; None: it is looked for in the root.
        """
        manifest = artifact.manifest
        mark = f"fingerprint.{manifest.stage}"
        if self.client is None or self._tag(mark) == manifest.fingerprint:
            return
        for name in (MANIFEST, REPORT_JSON, REPORT_HTML):
            if (artifact.dir / name).is_file():
                self.client.log_artifact(self.run_id, str(local_copy(artifact.dir / name)), f"stages/{manifest.stage}")
        self._log_preview(artifact, hf_dir)
        if manifest.stage in _DATASETS:
            self._log_dataset(artifact)
        # The mark comes last: what was logged in part is logged again.
        self._batch(tags={f"reused.{manifest.stage}": str(reused).lower(), mark: manifest.fingerprint})

    @guarded
    def _log_preview(self, artifact: Artifact, hf_dir: Path | None) -> None:
        page = render_preview(Target(artifact), PreviewOptions(num_samples=_PREVIEW_SAMPLES, hf_dir=hf_dir))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, PREVIEW_HTML)
            path.write_text(page, encoding="utf-8")
            self.client.log_artifact(self.run_id, str(path), f"stages/{artifact.manifest.stage}")

    def _log_dataset(self, artifact: Artifact) -> None:
        manifest = artifact.manifest
        place = str(absolute(artifact.dir))
        source = LocalArtifactDatasetSource(place) if is_local(artifact.dir) else resolve_dataset_source(place)
        dataset = MetaDataset(source, name=manifest.stage, digest=manifest.fingerprint)  # a digest has at most 36 chars
        tags = {"mlflow.data.context": _DATASETS[manifest.stage], "num_samples": str(manifest.num_samples)}
        tags |= {"shards_sha256": ",".join(shard.sha256[:12] for shard in manifest.shards)[:500]}
        inputs = [InputTag(key, value) for key, value in tags.items() if value]
        self.client.log_inputs(self.run_id, [DatasetInput(dataset._to_mlflow_entity(), inputs)])

    def sink(self) -> MetricsSink:
        """For training metrics, live. Steps that the run holds from an earlier try are not sent again."""
        known: set[int] | None = None

        def send(rows: Sequence[tuple[MetricsRow, int]]) -> None:
            nonlocal known
            if known is None:
                known = self._known_steps()
            self._send_rows([(row, moment) for row, moment in rows if row.step not in known])

        return MetricsSink(send, _now_ms)

    def _known_steps(self) -> set[int]:
        if self.client is None:
            return set()
        return {metric.step for metric in self.client.get_metric_history(self.run_id, "loss")}

    def _send_rows(self, rows: Sequence[tuple[MetricsRow, int]]) -> None:
        if self.client is None:
            return
        metrics: list[Metric] = []
        for row, moment in rows:
            values = row.model_dump(exclude={"step"}, exclude_none=True)
            if len(metrics) + len(values) > _METRICS_A_BATCH:  # a row is sent whole or not at all
                self.client.log_batch(self.run_id, metrics=metrics)
                metrics = []
            metrics += [Metric(name, float(value), moment, row.step) for name, value in values.items()]
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)

    @guarded
    def replay_metrics(self, trained: Artifact) -> int:
        """Send the steps of a training's metrics.jsonl that the run does not hold; returns how many."""
        if self.client is None:
            return 0
        known = self._known_steps()
        missing = [(row, _now_ms()) for row in read_metrics(trained.dir) if row.step not in known]
        self._send_rows(missing)
        return len(missing)

    @guarded
    def log_evaluation(self, evaluated: Artifact, model_id: str | None = None) -> None:
        """Scores of every subset, the overall ones under their bare names, and a table of answers with pictures."""
        if self.client is None or self._is_logged("scores", evaluated.manifest.fingerprint):
            return
        scores = flat_scores(evaluated.manifest.stats["scores"])
        dataset = {"dataset_name": "convert", "dataset_digest": evaluated.manifest.parents["samples"].fingerprint}
        about = {"model_id": model_id, **dataset} if model_id else {}
        for name, value in scores.items():
            self.client.log_metric(self.run_id, name, value, **about)
        self._log_predictions(evaluated.dir)
        self._set_logged("scores", evaluated.manifest.fingerprint)

    def _log_predictions(self, directory: StorePath) -> None:
        if any(item.path == PREDICTIONS_TABLE for item in self.client.list_artifacts(self.run_id)):
            return  # log_table would append
        rows = wrong_first(directory, MAX_PREDICTIONS)
        with tempfile.TemporaryDirectory() as folder:
            for number, row in enumerate(rows):
                picture = Path(folder, f"{number}.png")
                picture.write_bytes(row["image"] or _TEXT_ONLY_PNG)
                row["image"] = mlflow.Image(str(picture))
            table = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
            if table:
                self.client.log_table(self.run_id, table, PREDICTIONS_TABLE)

    @guarded
    def log_model(self, exported: Artifact, scores: Mapping[str, Mapping[str, float]], name: str) -> str | None:
        """The exported directory as a logged model and a registered version that carries its scores.

        Returns:
            the logged model's id.
        """
        if self.client is None:
            return None
        if self._is_logged("export_model", exported.manifest.fingerprint):
            return self._tag("athanor.model_id")
        hf_dir, stats = exported.dir.resolve() / HF_EXPORT, exported.manifest.stats
        flat = {key: f"{value:.6g}" for key, value in flat_scores(scores).items()}
        tags = {"hf_dir": str(hf_dir), "fingerprint": exported.manifest.fingerprint}
        params = {key: str(value) for key, value in flatten({k: v for k, v in stats.items() if k != "files"}).items()}
        model = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=self.run_id,
            tags=tags,
            params=params,
            model_type="hf_directory",
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=stats.get("steps") or 0)])
        version = self._register(name, hf_dir, model.model_id, {**tags, **flat})
        self._batch(tags={"athanor.model_id": model.model_id, "athanor.model_version": f"{name}/{version}"})
        self._set_logged("export_model", exported.manifest.fingerprint)
        return model.model_id

    def _register(self, name: str, hf_dir: StorePath, model_id: str, tags: Mapping[str, str]) -> str:
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = hf_dir.as_uri() if tracking_uri(self.root).startswith("sqlite") else f"models:/{model_id}"
        version = self.client.create_model_version(name, source, self.run_id, dict(tags), model_id=model_id)
        return version.version

    @guarded
    def finish(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED. One that was finished before keeps its times."""
        if self.client is not None and self.client.get_run(self.run_id).info.status != "FINISHED":
            self.client.set_terminated(self.run_id, status)

    def url(self) -> str:
        """The run's page, on the server that is set, or on the one that `server_command` starts."""
        return f"{server_url(self.root)}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @guarded
    def compare_with_last(self) -> str | None:
        """MLflow's page that compares this run with the one started last before it, if there is one."""
        if self.client is None:
            return None
        newest = self.client.search_runs([self.experiment_id], order_by=["start_time DESC"], max_results=5)
        others = [run.info.run_id for run in newest if run.info.run_id != self.run_id]
        return compare_url([self.run_id, others[0]], self.experiment_id, server_url(self.root)) if others else None

    def _batch(self, *, params: Mapping[str, str] | None = None, tags: Mapping[str, str] | None = None) -> None:
        log_in_chunks(self.client, self.run_id, params or {}, tags or {})

    def _tag(self, name: str) -> str | None:
        return self.client.get_run(self.run_id).data.tags.get(name)

    def _is_logged(self, what: str, fingerprint: str) -> bool:
        return self._tag(f"athanor.logged.{what}") == fingerprint

    def _set_logged(self, what: str, fingerprint: str) -> None:
        self.client.set_tag(self.run_id, f"athanor.logged.{what}", fingerprint)


def open_run(
    root: StorePath, experiment: str, name: str, identity: str, params: Mapping[str, Any], tags: Mapping[str, str]
) -> str | None:
    """The MLflow run of a pipeline: the one that this identity had before, or a new one. None where MLflow fails.

    Args:
        identity: fingerprint of everything that decides the outcome; the same pipeline run again goes on in its run.
        params: nested config; becomes dotted parameters.
        tags: may change between two tries.
    """
    try:
        client = connect(root)
        experiment_id = _experiment(client, root, experiment)
        found = client.search_runs([experiment_id], f"tags.`{IDENTITY_TAG}` = '{identity}'", max_results=1)
        if found:
            run_id, status = found[0].info.run_id, found[0].info.status
            client.update_run(run_id, status if status == "FINISHED" else "RUNNING", name)
            params = {}
        else:
            run_id = client.create_run(experiment_id, run_name=name).info.run_id
        log_in_chunks(client, run_id, flatten(params), {**tags, IDENTITY_TAG: identity})
        return run_id
    except Exception as error:
        log.warning("MLflow at %s takes no run (%s); the pipeline goes on without", tracking_uri(root), error)
        return None


def log_in_chunks(client: MlflowClient, run_id: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Parameters and tags, cut to MLflow's limits: 100 a call, 6000 and 8000 characters."""
    entities = [Param(key, str(value)[:6000]) for key, value in params.items()]
    for start in range(0, len(entities), 100):
        client.log_batch(run_id, params=entities[start : start + 100])
    marks = [RunTag(key, str(value)[:8000]) for key, value in tags.items()]
    for start in range(0, len(marks), 100):
        client.log_batch(run_id, tags=marks[start : start + 100])


def _experiment(client: MlflowClient, root: StorePath, name: str) -> str:
    with filelock.FileLock(side_dir(root) / "mlflow.db.lock", timeout=120):
        if (found := client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        is_local = tracking_uri(root).startswith("sqlite")
        location = (side_dir(root) / "mlflow-artifacts").resolve().as_uri() if is_local else None
        return client.create_experiment(name, location)


def flat_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """{"overall": {"exact_match": 1.0}, "pairs": ...} -> {"exact_match": 1.0, "exact_match/pairs": ...}."""
    flat = {}
    for subset, metrics in scores.items():
        for metric, value in metrics.items():
            if value is not None:
                flat[metric if subset == "overall" else f"{metric}/{subset}"] = float(value)
    return flat


def wrong_first(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Rows of predictions.parquet: wrong answers first, then right ones, in their order, at most `limit`."""
    table = pq.read_table(local_copy(directory / "predictions.parquet"))
    correct = pc.fill_null(pc.cast(table["correct"], "float64"), 0.0)
    order = pc.sort_indices(correct) if len(table) else []
    return table.take(order[:limit]).to_pylist() if len(table) else []


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
