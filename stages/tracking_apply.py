"""One entry of a tracking journal at a time becomes what MLflow holds. Every operation may be repeated.

A stage, a model and scores are marked by a tag once they are whole; steps that a run holds are not sent again, and a
metric that is sent twice has the same time, so that MLflow's primary key keeps one.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.tracking_store import connect, experiment_of, store_digest, tracking_uri  # sets what mlflow reads

# isort: split
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, Run, RunTag

from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.store import StorePath, local_copy, location
from stages.artifact import Artifact
from stages.preview import PreviewOptions, render_preview
from stages.preview_target import Target
from stages.registry_config import RegistryConfig
from stages.report import REPORT_HTML, REPORT_JSON
from stages.scoring.names import flat_scores
from stages.tracking_inputs import (
    COMPARISON_TABLE,
    DATASETS,
    PREDICTIONS_TABLE,
    dataset_input,
    gain_metrics,
    log_comparison,
    log_predictions,
)
from stages.tracking_journal import Entry, State
from stages.tracking_notes import NOTE_TAG, experiment_note, run_note
from stages.tracking_registry import REASON_TAG, promote, register
from trainer.contract import HF_EXPORT, PROFILE, MetricsRow, read_metrics

IDENTITY_TAG = "athanor.identity"
PREVIEW_HTML = "preview.html"
RECIPE_YAML = "recipe.yaml"
COMPARED_RUNS = 8
METRICS_A_BATCH = 1000
_CREATION_TAG = "athanor.creation"
_PREVIEW_SAMPLES = 12
log = logging.getLogger("athanor.tracking")


class Applier:
    """Delivers the entries of one journal.

    Args:
        state: of the journal; what the operations learn is written into it.
        on_answer: is called whenever MLflow has answered.
    """

    def __init__(self, root: StorePath, state: State, on_answer: Callable[[], None] = lambda: None) -> None:
        self.root, self.state, self.on_answer = root, state, on_answer
        self._client: MlflowClient | None = None
        self._known: set[int] | None = None
        self._ops: dict[str, Callable[[Entry], None]] = {
            "open": self._open,
            "stage": self._stage,
            "system": self._system,
            "training": self._training,
            "model": self._model,
            "scores": self._scores,
            "comparison": self._comparison,
            "finish": self._finish,
        }

    def apply(self, entries: Sequence[Entry]) -> None:
        """Deliver one entry, or several of metrics at once.

        Raises:
            Exception: whatever MLflow or this machine's disk raises; `may_pass` judges it.
        """
        self._connect()
        if entries[0].op == "metrics":
            self._metrics([(MetricsRow(**row), entry.time_ms) for entry in entries for row in entry.data["rows"]])
        else:
            (entry,) = entries
            self._ops[entry.op](entry)

    def forget(self) -> None:
        """After a failure nothing that was read before is believed."""
        self._client = self._known = None

    def _connect(self) -> None:
        if self._client is None or self.state.store != store_digest(self.root):
            self._client, self._known = _Followed(connect(self.root), self.on_answer), None
            self.state.store = store_digest(self.root)

    def reopen(self) -> None:
        """The run is there no longer: find it or make it again."""
        self._connect()
        self._find_or_create(self.state.opened, self.state.opened_ms or 0)

    # --- the run ---

    def _open(self, entry: Entry) -> None:
        self.state.opened, self.state.opened_ms, self.state.finished = entry.data, entry.time_ms, False
        self.state.first_ms = self.state.first_ms or entry.time_ms
        self._find_or_create(entry.data, entry.time_ms)

    def _find_or_create(self, opened: Mapping[str, Any], time_ms: int) -> None:
        client, name = self._client, opened["name"]
        experiment_id = experiment_of(client, self.root, opened["experiment"])
        self.state.experiment_id = experiment_id
        found = client.search_runs(
            [experiment_id], self._is_ours(), max_results=1, order_by=["attributes.start_time ASC"]
        )
        if found:
            run_id, status = found[0].info.run_id, found[0].info.status
            client.update_run(run_id, status if status == "FINISHED" else "RUNNING", name)
        else:
            marks = {IDENTITY_TAG: opened["identity"], _CREATION_TAG: opened["creation"]}
            run_id = client.create_run(experiment_id, time_ms, marks, name).info.run_id
        self.state.run_id, self._known = run_id, None
        if not self._is_logged("params", opened["identity"]):
            log_in_chunks(client, run_id, flatten(opened["params"]), {})
            client.log_text(run_id, opened["recipe_yaml"], RECIPE_YAML)
            self._set_logged("params", opened["identity"])
        log_in_chunks(client, run_id, {}, {**opened["tags"], NOTE_TAG: opened["note"]})

    def _is_ours(self) -> str:
        return f"tags.`{IDENTITY_TAG}` = '{self.state.opened['identity']}'"

    def _finish(self, entry: Entry) -> None:
        """End the run: FINISHED, FAILED or KILLED. One that was finished before keeps its times."""
        client, state, run_id = self._client, self.state, self.state.run_id
        if self._run().info.status != "FINISHED":
            end_ms = entry.data.get("time_ms") or entry.time_ms
            client.log_metric(run_id, "flow_seconds", (end_ms - (state.opened_ms or end_ms)) / 1e3, end_ms, 0)
            client.set_terminated(run_id, entry.data["status"], end_ms)
        self._drop_doubles()
        self._describe()
        newest = client.search_runs(
            [state.experiment_id], order_by=["attributes.start_time DESC"], max_results=COMPARED_RUNS
        )
        ids = [run.info.run_id for run in newest]
        if len(ids) > 1:
            note = experiment_note([run.info.run_name for run in newest], ids, state.experiment_id)
            client.set_experiment_tag(state.experiment_id, NOTE_TAG, note)
        state.compare, state.finished = [other for other in ids if other != run_id][:1], True

    def _drop_doubles(self) -> None:
        """A server that answered too late may have made a run for each try: they carry the same mark."""
        mark = f"tags.`{_CREATION_TAG}` = '{self.state.opened['creation']}'"
        for run in self._client.search_runs([self.state.experiment_id], mark):
            if run.info.run_id != self.state.run_id:
                self._client.delete_run(run.info.run_id)

    def _describe(self) -> None:
        state = self.state
        page = f"#/experiments/{state.experiment_id}/runs/{state.run_id}"
        note = run_note(state.opened["note"], page, state.stages, state.scores, self._tag(REASON_TAG))
        self._client.set_tag(state.run_id, NOTE_TAG, note)

    # --- stages ---

    def _stage(self, entry: Entry) -> None:
        """Fingerprint, manifest, reports and preview of a stage; a dataset becomes an input of the run."""
        artifact = Artifact.load(location(entry.data["dir"]))
        manifest, run_id = artifact.manifest, self.state.run_id
        stage = entry.data.get("name") or manifest.stage
        self.state.stages[stage] = entry.data["dir"]
        mark = f"fingerprint.{stage}"
        if self._tag(mark) == manifest.fingerprint:
            return
        for name in (MANIFEST, REPORT_JSON, REPORT_HTML):
            if (artifact.dir / name).is_file():
                self._client.log_artifact(run_id, str(local_copy(artifact.dir / name)), f"stages/{stage}")
        for trace in sorted((artifact.dir / PROFILE).iterdir()) if (artifact.dir / PROFILE).is_dir() else ():
            self._client.log_artifact(run_id, str(local_copy(trace)), f"stages/{stage}/{PROFILE}")
        self._preview(artifact, entry.data["hf_dir"], stage)
        if manifest.stage in DATASETS:
            self._client.log_inputs(run_id, [dataset_input(artifact)])
        # The mark comes last: what was logged in part is logged again.
        reused = str(entry.data["reused"]).lower()
        self._batch({f"reused.{stage}": reused, mark: manifest.fingerprint})

    def _preview(self, artifact: Artifact, hf_dir: str | None, stage: str) -> None:
        options = PreviewOptions(num_samples=_PREVIEW_SAMPLES, hf_dir=Path(hf_dir) if hf_dir else None)
        try:
            page = render_preview(Target(artifact), options)
        except Exception as error:  # a page less; the rest of the stage is worth having
            log.warning("tracking: no preview of %s (%s: %s)", artifact.dir, type(error).__name__, error)
            return
        self._client.log_text(self.state.run_id, page, f"stages/{stage}/{PREVIEW_HTML}")

    # --- metrics ---

    def _metrics(self, rows: Sequence[tuple[MetricsRow, int]]) -> None:
        """Rows with the time that those have which carry none. Steps that the run holds are left out."""
        if self._known is None:
            self._known = {m.step for m in self._client.get_metric_history(self.state.run_id, "loss")}
        batch: list[Metric] = []
        steps: set[int] = set()
        for row, written in rows:
            if row.step in self._known or row.step in steps:
                continue
            values = row.model_dump(exclude={"step", "time_ms"}, exclude_none=True)
            if len(batch) + len(values) > METRICS_A_BATCH:  # a row is sent whole or not at all
                self._send(batch, steps)
                batch, steps = [], set()
            moment = row.time_ms or written
            batch += [Metric(name, float(value), moment, row.step) for name, value in values.items()]
            steps.add(row.step)
        self._send(batch, steps)

    def _send(self, batch: Sequence[Metric], steps: set[int]) -> None:
        if batch:
            self._client.log_batch(self.state.run_id, metrics=batch)
            self._known |= steps

    def _system(self, entry: Entry) -> None:
        step = (entry.time_ms - (self.state.first_ms or entry.time_ms)) // 1000
        metrics = [Metric(name, value, entry.time_ms, step) for name, value in entry.data["values"].items()]
        self._client.log_batch(self.state.run_id, metrics=metrics)

    def _training(self, entry: Entry) -> None:
        """What the live metrics have missed, and the headline figures of the whole training."""
        trained = Artifact.load(location(entry.data["dir"]))
        rows = read_metrics(trained.dir)
        self._metrics([(row, entry.time_ms) for row in rows])
        if not rows or self._is_logged("training", trained.manifest.fingerprint):
            return
        steps = [b.step - a for a, b in zip([0, *(row.step for row in rows)], rows)]
        seconds = sum(count * row.step_seconds for count, row in zip(steps, rows))
        heldout = [row.heldout_loss for row in rows if row.heldout_loss is not None]
        values = {
            "final_loss": rows[-1].loss,
            "final_heldout_loss": heldout[-1] if heldout else None,
            "train_seconds": seconds,
            "train_tokens_per_second": rows[-1].tokens / seconds if seconds else None,
        }
        moment = rows[-1].time_ms or entry.time_ms
        metrics = [Metric(name, value, moment, rows[-1].step) for name, value in values.items() if value is not None]
        self._client.log_batch(self.state.run_id, metrics=metrics)
        self._set_logged("training", trained.manifest.fingerprint)

    # --- model and scores ---

    def _model(self, entry: Entry) -> None:
        """The exported directory as a logged model and, where nothing speaks against it, a registered version that
        carries its scores."""
        exported, name = Artifact.load(location(entry.data["dir"])), entry.data["name"]
        mark = exported.manifest.fingerprint
        if self._is_logged("export_model", mark):
            return
        hf_dir = location(entry.data.get("hf_dir") or str(exported.dir / HF_EXPORT))  # none in entries of before
        client, run_id = self._client, self.state.run_id
        tags = {"hf_dir": str(hf_dir), "fingerprint": mark}
        model_id = self._logged_model(exported, name, tags)
        if refusals := entry.data.get("refusals"):
            self._batch({"athanor.model_id": model_id, REASON_TAG: f"not registered: {'; '.join(refusals)}"})
            return  # no mark: with other gates the same model is looked at again
        flat = {key: f"{value:.6g}" for key, value in flat_scores(entry.data["scores"]).items()}
        source = f"models:/{model_id}" if tracking_uri(self.root).startswith("http") else hf_dir.as_uri()
        version = register(client, name, source, run_id, model_id, {**tags, **flat}).version
        reason = promote(client, self.root, name, version, RegistryConfig(**self.state.opened["registry"]))
        words = {"athanor.model_id": model_id, "athanor.model_version": f"{name}/{version}", REASON_TAG: reason}
        self._batch(words)
        self._set_logged("export_model", mark)

    def _logged_model(self, exported: Artifact, name: str, tags: Mapping[str, str]) -> str:
        client, stats, run_id = self._client, exported.manifest.stats, self.state.run_id
        found = client.search_logged_models([self.state.experiment_id], f"tags.fingerprint = '{tags['fingerprint']}'")
        model_id = next((model.model_id for model in found if model.source_run_id == run_id), None)
        if model_id is None:
            about = flatten({key: value for key, value in stats.items() if key != "files"})
            model = client.create_logged_model(
                self.state.experiment_id,
                name=name,
                source_run_id=run_id,
                tags=dict(tags),
                params={key: str(value) for key, value in about.items()},
                model_type="hf_directory",
            )
            model_id = model.model_id
        client.finalize_logged_model(model_id, "READY")
        outputs = self._run().outputs
        if not any(output.model_id == model_id for output in (outputs.model_outputs if outputs else ())):
            client.log_outputs(run_id, [LoggedModelOutput(model_id, step=stats.get("steps") or 0)])
        return model_id

    def _scores(self, entry: Entry) -> None:
        """Scores of every subset, the overall ones under their bare names, and a table of answers with pictures."""
        evaluated = Artifact.load(location(entry.data["dir"]))
        self.state.scores = evaluated.manifest.stats["scores"]
        if self._is_logged("scores", evaluated.manifest.fingerprint):
            return
        client, run_id = self._client, self.state.run_id
        dataset = {"dataset_name": "convert", "dataset_digest": evaluated.manifest.parents["samples"].fingerprint}
        model_id = self._tag("athanor.model_id") if entry.data["has_model"] else None
        about = {"model_id": model_id, **dataset} if model_id else {}
        scores = flat_scores(self.state.scores).items()
        metrics = [Metric(name, value, entry.time_ms, 0, **about) for name, value in scores]
        self._log_metrics(metrics)
        if not any(item.path == PREDICTIONS_TABLE for item in client.list_artifacts(run_id)):  # else it would append
            with tempfile.TemporaryDirectory() as folder:
                log_predictions(client, run_id, evaluated.dir, Path(folder))
        self._set_logged("scores", evaluated.manifest.fingerprint)
        self._describe()

    def _comparison(self, entry: Entry) -> None:
        """The gain over the model before training with its interval, and a table of the answers that differ most."""
        compared = Artifact.load(location(entry.data["dir"]))
        if self._is_logged("comparison", compared.manifest.fingerprint):
            return
        client, run_id = self._client, self.state.run_id
        values = gain_metrics(compared.manifest.stats["subsets"])
        metrics = [Metric(name, value, entry.time_ms, 0) for name, value in values.items()]
        self._log_metrics(metrics)
        if not any(item.path == COMPARISON_TABLE for item in client.list_artifacts(run_id)):  # else it would append
            with tempfile.TemporaryDirectory() as folder:
                log_comparison(client, run_id, compared.dir, Path(folder))
        self._set_logged("comparison", compared.manifest.fingerprint)

    def _log_metrics(self, metrics: Sequence[Metric]) -> None:
        for start in range(0, len(metrics), METRICS_A_BATCH):
            self._client.log_batch(self.state.run_id, metrics=metrics[start : start + METRICS_A_BATCH])

    # --- marks ---

    def _run(self) -> Run:
        return self._client.get_run(self.state.run_id)

    def _batch(self, tags: Mapping[str, str]) -> None:
        log_in_chunks(self._client, self.state.run_id, {}, tags)

    def _tag(self, name: str) -> str | None:
        return self._run().data.tags.get(name)

    def _is_logged(self, what: str, fingerprint: str) -> bool:
        return self._tag(f"athanor.logged.{what}") == fingerprint

    def _set_logged(self, what: str, fingerprint: str) -> None:
        self._client.set_tag(self.state.run_id, f"athanor.logged.{what}", fingerprint)


class _Followed:
    """An MlflowClient that says when a call was answered: a slow server is not one that does not answer."""

    def __init__(self, client: MlflowClient, on_answer: Callable[[], None]) -> None:
        self._client, self._on_answer = client, on_answer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            self._on_answer()
            return answer

        method = getattr(self._client, name)
        return call


def log_in_chunks(client: MlflowClient, run_id: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Parameters and tags, cut to MLflow's limits: 100 a call, 6000 and 8000 characters."""
    entities = [Param(key, str(value)[:6000]) for key, value in params.items()]
    for start in range(0, len(entities), 100):
        client.log_batch(run_id, params=entities[start : start + 100])
    marks = [RunTag(key, str(value)[:8000]) for key, value in tags.items()]
    for start in range(0, len(marks), 100):
        client.log_batch(run_id, tags=marks[start : start + 100])
