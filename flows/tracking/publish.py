"""Publishes a run: adds to MLflow what it lacks of the run's record, artifacts and metrics.

A run consists of parts. Once MLflow holds a part completely, a tag of the MLflow run has the part's state; a part whose
state has changed is added again. The times and steps of metrics come from files. So publishing again adds exactly the
missing content, whatever failed before.
"""

import contextlib
import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import mlflow
import pyarrow.compute as pc
import pyarrow.parquet as pq
from mlflow import MlflowClient
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.data.sources import LocalArtifactDatasetSource
from mlflow.entities import DatasetInput, InputTag, Run

from dataset_builders.contracts.manifest import MANIFEST, fingerprint, flatten
from dataset_builders.storage.files import GrowingFile
from dataset_builders.storage.store import StorePath, absolute, is_local, local_copy, modified
from flows.libraries.mlflow_private import VIEW_TAG, entity_of, first_view
from flows.tracking.notes import NOTE_TAG, experiment_note, run_note, score_text
from flows.tracking.record import (
    MlflowState,
    Registration,
    StageEntry,
    TrackedRun,
    end_killed_run,
    error_line,
    find_place,
    live_path,
    load_record,
    now_ms,
    publish_lock,
    samples_path,
    save_learnt,
)
from flows.tracking.registry import MODEL_TAG, REASON_TAG, log_model, register_model, standing
from flows.tracking.run_writer import (
    FINGERPRINT,
    HIDDEN,
    REFERENCES,
    FilePlace,
    RunWriter,
    chosen_files,
    metric_name,
    references,
    sizes_of,
)
from flows.tracking.store import check_own_database, connect, experiment_of, may_pass, store_digest, tracking_uri
from flows.tracking.system import CPU_METRIC
from stages.evaluate.predictions import COMPARISON, PREDICTIONS
from stages.release.flavor import FLAVOR_FILES
from stages.shared.artifacts.artifact import Artifact
from stages.shared.scoring.names import OVERALL, flat_scores
from trainer.contract.names import METRICS_JSONL
from trainer.contract.result import MetricsRow, read_metrics

_IDENTITY_TAG, _CREATION_TAG = f"{HIDDEN}identity", f"{HIDDEN}creation"
_HELD = f"{HIDDEN}held."  # and the name of a part
_LOSS = "loss"  # a metric of every row of a training
RECIPE_YAML, EXECUTION_YAML = "recipe.yaml", "execution.yaml"
PREDICTIONS_TABLE, COMPARISON_TABLE = "predictions.json", "comparison.json"
MAX_ANSWERS = 64
COMPARED_RUNS = 8
_TEXT_ONLY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)  # a white pixel for answers without an image, because a table's image column needs an image in every row
log = logging.getLogger("athanor.tracking")


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome for a run that was not completely in MLflow.

    Attributes:
        name: name of the MLflow run.
        sent: kind of content that was added -> number.
        problem: why the rest could not be sent; empty if nothing is left, or if the run's own process publishes it.
        is_sending: whether the run's own process publishes it.
    """

    name: str
    sent: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    is_sending: bool = False


class Publication:
    """The publication of one run, which may be tried again and again.

    Args:
        announce: function that is called before an upload with the seconds that the upload may take, and with 0
            whenever a part of the run is complete.

    Attributes:
        lock: the lock that the process that publishes the run holds.
        sent: kind of content that was added -> number.
    """

    def __init__(self, root: StorePath, key: str, announce: Callable[[float], None] = lambda seconds: None) -> None:
        self.root, self.key, self.announce = root, key, announce
        self.lock = publish_lock(root, key)
        self.sent: Counter[str] = Counter()
        self.record: TrackedRun | None = None
        self._client: MlflowClient | None = None
        self._writer: RunWriter | None = None
        self._followed: dict[Path, GrowingFile] = {}
        self._held_files: dict[str, list[str]] = {}  # stage -> names of its files that the run holds

    def attempt(self) -> Published:
        """Publish the run, unless another process does, and keep the lock. A run whose process was killed is ended."""
        name = self.key
        try:
            record = load_record(self.root, self.key)
            name = record.opening.name
            with contextlib.suppress(filelock.Timeout):
                if not self.lock.is_locked:
                    self.lock.acquire(timeout=0)
            if not self.lock.is_locked:
                return Published(name, is_sending=True)
            if record.is_killed():
                end_killed_run(self.root, self.key)
            self.run()
        except Exception as error:
            return Published(name, self.sent, error_line(error))
        return Published(name, self.sent)

    def run(self) -> None:
        """Bring MLflow up to the newest revision of the record and the newest lines of metrics.

        Raises:
            InputError: the root's own database is ruined or cannot be written.
            Exception: another error of MLflow or this machine's disk that may be temporary. Nothing is lost.
        """
        self.record = record = load_record(self.root, self.key)
        try:
            is_open = record.learnt.store == store_digest(self.root) and self._writer is not None
            if record.is_empty():  # a run that is refused before its first stage leaves none in MLflow
                if record.is_waiting():
                    save_learnt(self.root, self.key, record.learnt.model_copy(update={"published": record.revision}))
            elif is_open and record.learnt.published == record.revision:
                self._live_rows()
            else:
                self._publish()
        except Exception:
            self._client = self._writer = None  # after a failure everything is read again
            check_own_database(self.root)
            raise

    def _publish(self) -> None:
        record, store = self.record, store_digest(self.root)
        if record.learnt.store != store:
            record.learnt, self._client = MlflowState(store=store), None
        self._client = self._client or connect(self.root)
        before, self._writer = self._writer, RunWriter(self._client, self._find_or_create())
        if before is not None and before.run_id == self._writer.run_id:
            self._writer.steps = before.steps
        else:
            self._followed, self._held_files = {}, {}  # all lines are read again and compared with the run's
        learnt = record.learnt
        learnt.run_id, learnt.experiment_id = self._writer.run_id, self._writer.experiment_id
        save_learnt(self.root, self.key, learnt)  # other processes can now link to the run's page
        refused = {}
        for name, state, add in self._parts():
            mark = f"{_HELD}{name}"
            if state is not None and self._writer.tags.get(mark) == state:
                continue
            try:
                add()
                if state is not None:  # the mark is set last, so that a part that was added only in part is added again
                    self._writer.set_tags({mark: state})
                self.announce(0)
            except Exception as error:
                if may_pass(error):
                    raise
                refused[name] = error_line(error, 500)
                if refused[name] != learnt.refused.get(name):
                    log.warning("tracking: MLflow never takes the %s (%s); the pipeline goes on", name, refused[name])
        learnt.refused, learnt.published = refused, record.revision
        save_learnt(self.root, self.key, learnt)

    def _find_or_create(self) -> Run:
        """Return the MLflow run of this identity, or make it. A run that failed or was killed is set to running."""
        client, record, opening = self._client, self.record, self.record.opening
        experiment_id = experiment_of(client, self.root, opening.experiment)
        same = f"tags.`{_IDENTITY_TAG}` = '{opening.identity}'"
        runs = client.search_runs([experiment_id], same, order_by=["attributes.start_time ASC"])
        if not runs:
            marks = {_IDENTITY_TAG: opening.identity, _CREATION_TAG: record.creation}
            return client.create_run(experiment_id, record.opened_ms, marks, opening.name)
        for double in runs[1:]:
            if double.data.tags.get(_CREATION_TAG) == record.creation:  # made because the server answered too late
                client.delete_run(double.info.run_id)
        info = runs[0].info
        status = "RUNNING" if record.status is None and info.status != "FINISHED" else info.status
        if (status, opening.name) != (info.status, info.run_name):
            client.update_run(info.run_id, status, opening.name)
        return runs[0]

    def _parts(self) -> Iterator[tuple[str, str | None, Callable[[], None]]]:
        """Yield name, state and function of each part, in order. A part without a state is looked at each time."""
        opening, registration = self.record.opening, self.record.registration
        texts = opening.model_dump_json(include={"params", "recipe_yaml", "execution_yaml"})
        yield "recipe", fingerprint(texts), self._recipe
        yield "tags", None, lambda: self._writer.set_tags(opening.tags)
        for name, entry in self.record.stages.items():
            yield f"stage {name}", f"{entry.fingerprint} {opening.artifacts}", partial(self._stage, name, entry)
        yield "metrics", None, self._live_rows
        if registration is not None:
            asked = [registration.model_dump_json(), opening.registry.model_dump_json(), opening.artifacts]
            yield "model", registration.exported, partial(log_model, self._writer, self.root, registration)
            yield "scores", registration.evaluated, partial(self._scores, registration)
            yield "registration", fingerprint(asked), partial(self._register, registration)
        yield "description", None, self._describe
        if self.record.status is not None:
            yield "end", None, self._end

    def _count(self, what: str, number: int = 1) -> None:
        self.sent.update({what: number} if number else {})

    # --- the run ---

    def _recipe(self) -> None:
        writer, opening = self._writer, self.record.opening
        writer.log_params(flatten(opening.params))
        for name, text in ((RECIPE_YAML, opening.recipe_yaml), (EXECUTION_YAML, opening.execution_yaml)):
            if text:
                writer.client.log_text(writer.run_id, text, name)
        self._count("recipe")

    def _describe(self) -> None:
        record, writer = self.record, self._writer
        registration, learnt, decision = record.registration, record.learnt, writer.tags.get(REASON_TAG)
        learnt.verdict = decision or ""
        if registration and not registration.refusals and learnt.decided_ms < record.opened_ms:
            learnt.verdict = standing(writer)  # an earlier try decided on the model
        for name in record.stages.keys() - self._held_files.keys():
            listed = writer.client.list_artifacts(writer.run_id, f"stages/{name}")
            self._held_files[name] = [Path(item.path).name for item in listed]
        stages = {name: (entry.dir, self._held_files[name]) for name, entry in record.stages.items()}
        scores = registration.scores if registration else {}
        figures = headline(writer.client.get_run(writer.run_id).data.metrics, scores.get(OVERALL, {}))
        writer.set_tags({NOTE_TAG: run_note(record.opening.note, writer.page, stages, scores, decision, figures)})

    def _end(self) -> None:
        """End the run: FINISHED, FAILED or KILLED. A run that was finished before keeps its times."""
        writer, record = self._writer, self.record
        if writer.status != "FINISHED" and (writer.status, writer.end_ms) != (record.status, record.ended_ms):
            seconds = (record.ended_ms - record.opened_ms) / 1e3
            writer.log_metrics({metric_name("flow_seconds"): seconds}, record.ended_ms)
            writer.client.set_terminated(writer.run_id, record.status, record.ended_ms)
            self._count("end")
        newest = []  # finished runs on the same data, this run included; none if this run has no samples yet
        if (samples := record.stages.get("convert")) is not None:
            alike = f"attributes.status = 'FINISHED' AND tags.`{FINGERPRINT}convert` = '{samples.fingerprint}'"
            order = ["attributes.start_time DESC"]
            newest = writer.client.search_runs([writer.experiment_id], alike, 1, COMPARED_RUNS, order)
        ids = [run.info.run_id for run in newest]
        if len(ids) > 1:
            note = experiment_note([run.info.run_name for run in newest], ids, writer.experiment_id)
            writer.client.set_experiment_tag(writer.experiment_id, NOTE_TAG, note)
            writer.client.set_experiment_tag(writer.experiment_id, VIEW_TAG, json.dumps(first_view()))
        record.learnt.compare = next((other for other in ids if other != writer.run_id), None)

    # --- stages and metrics ---

    def _stage(self, name: str, entry: StageEntry) -> None:
        """Add a stage: its curves or differences, a dataset of the run if the stage makes data, its files."""
        writer, artifact = self._writer, Artifact.load(find_place(self.root, entry.dir))
        if (artifact.dir / METRICS_JSONL).is_file():
            self._training(artifact)
        if (artifact.dir / COMPARISON).is_file():
            writer.log_metrics(gain_metrics(artifact.manifest.stats["subsets"]), _made_ms(artifact))
            differing = pq.read_table(local_copy(artifact.dir / COMPARISON))  # the most different answers come first
            log_answers(writer, COMPARISON_TABLE, differing.slice(0, MAX_ANSWERS).to_pylist())
        if entry.dataset is not None:
            writer.client.log_inputs(writer.run_id, [dataset_input(artifact, entry.dataset)])
        writer.set_tags({f"{FINGERPRINT}{name}": entry.fingerprint})
        self._count("stage")
        folder, sizes = f"stages/{name}", sizes_of(artifact.dir)
        chosen = chosen_files(artifact, self.record.opening.artifacts, sizes)
        files = {file: sizes[file] for file in chosen}
        self._count("file", FilePlace.of_run(writer).send(artifact.dir, files, folder, self._before_upload))
        if len(chosen) < len(sizes):
            text = references(artifact, entry.dir, sizes, chosen)
            writer.client.log_text(writer.run_id, text, f"{folder}/{REFERENCES}")
        self._held_files.pop(name, None)

    def _training(self, training: Artifact) -> None:
        """Add the rows that the live metrics have missed, and the headline figures of the complete training."""
        rows, made_ms = read_metrics(training.dir), _made_ms(training)
        self._count("step", self._writer.log_rows([row.model_dump() for row in rows], made_ms, _LOSS))
        if rows:
            self._writer.log_metrics(training_figures(rows), rows[-1].time_ms or made_ms, rows[-1].step)

    def _before_upload(self, seconds: float) -> None:
        """Add the newest training metrics, and announce how long the upload may take."""
        self._live_rows()
        self.announce(seconds)

    def _live_rows(self) -> None:
        """Add the new lines of the running training's metrics.jsonl, and the new samples of its machine."""
        path = live_path(self.root, self.record)
        if path is None:
            return
        self._count("step", self._follow(path, _LOSS))
        if self._writer.steps.get(_LOSS) or self.record.status is not None:
            # Not earlier, since MLflow's compare page begins with the first metric that a run got.
            self._count("machine sample", self._follow(samples_path(self.root, self.key), CPU_METRIC))

    def _follow(self, path: Path, metric: str) -> int:
        """Add the new lines of a file whose lines are rows of metrics, and return their number."""
        file, rows = self._followed.setdefault(path, GrowingFile(path)), []
        for line in file.new_lines().splitlines():
            with contextlib.suppress(ValueError):  # a crash has cut the line short
                rows.append(json.loads(line))
        number = self._writer.log_rows(rows, self.record.changed_ms, metric)
        file.take()
        return number

    # --- the model ---

    def _scores(self, registration: Registration) -> None:
        """Add the scores of every subset (overall scores under bare names), and a table of answers, wrong first."""
        writer, evaluation = self._writer, Artifact.load(find_place(self.root, registration.evaluated))
        about = {}
        if model_id := writer.tags.get(MODEL_TAG):
            samples = evaluation.manifest.parents["samples"]
            about = {"model_id": model_id, "dataset_name": samples.name, "dataset_digest": samples.fingerprint}
        interval = evaluation.manifest.stats.get("headlines", {}).get(OVERALL, {})
        ends = {f"score_{end}": interval[end] for end in ("low", "high") if interval.get(end) is not None}
        writer.log_metrics(flat_scores(registration.scores) | ends, _made_ms(evaluation), **about)
        log_answers(writer, PREDICTIONS_TABLE, wrong_first(evaluation.dir, MAX_ANSWERS))
        self._count("score table")

    def _register(self, registration: Registration) -> None:
        """Give the model its files, and then register it, so that a version always has complete files."""
        writer, opening, learnt = self._writer, self.record.opening, self.record.learnt
        if registration.refusals:
            writer.set_tags({REASON_TAG: f"not registered: {'; '.join(registration.refusals)}"})
            return
        model_id, hf_dir = writer.tags[MODEL_TAG], find_place(self.root, registration.hf_dir)
        place = FilePlace.of_model(writer.client, model_id)
        has_files = self._send_model(place, hf_dir)
        source = f"models:/{model_id}"
        if not tracking_uri(self.root).startswith("http"):  # without a server MLflow cannot resolve that
            source = place.address if has_files else hf_dir.parent.as_uri()
        if register_model(writer, self.root, registration, source, opening.registry):
            learnt.decided_ms = now_ms()
            save_learnt(self.root, self.key, learnt)
            self._count("model")

    def _send_model(self, place: FilePlace, hf_dir: StorePath) -> bool:
        """Give a logged model its files: MLflow's flavor, and hf/, a directory that transformers loads.

        Returns:
            False if the model's files stay where they are: in a store while MLflow keeps its files on this machine, or
            if the level is `references` and no hard link is possible.
        """
        may_upload, release = self.record.opening.artifacts != "references", hf_dir.parent
        if not is_local(hf_dir) and (not may_upload or place.local_dir() is not None):
            return False
        sizes = sizes_of(release)
        files = {name: sizes[name] for name in sizes if name.startswith(f"{hf_dir.name}/") or name in FLAVOR_FILES}
        return place.send(release, files, "", self._before_upload, may_upload) is not None


def _made_ms(artifact: Artifact) -> int:
    """Return the time at which an artifact was made, for metrics without a time, in milliseconds since 1970."""
    return int(modified(artifact.dir / MANIFEST) * 1000)


def dataset_input(artifact: Artifact, context: str) -> DatasetInput:
    """Return a stage's artifact as an input of the run: its fingerprint, address, counts, and use ("training")."""
    manifest = artifact.manifest
    place = str(absolute(artifact.dir))
    source = LocalArtifactDatasetSource(place) if is_local(artifact.dir) else resolve_dataset_source(place)
    dataset = MetaDataset(source, name=manifest.stage, digest=manifest.fingerprint)  # a digest has at most 36 chars
    tags = {"mlflow.data.context": context, "num_samples": str(manifest.num_samples)}
    tags |= {"shards_sha256": ",".join(shard.sha256[:12] for shard in manifest.shards)[:500]}
    return DatasetInput(entity_of(dataset), [InputTag(key, value) for key, value in tags.items() if value])


def gain_metrics(subsets: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return a comparison's stats as metrics: `gain`, `gain_low`, `gain_high`, and per subset `gain/<subset>`, ..."""
    values = {}
    for name, stats in subsets.items():
        ending = "" if name == OVERALL else f"/{name}"
        for metric, key in (("gain", "difference"), ("gain_low", "low"), ("gain_high", "high")):
            if math.isfinite(value := stats["difference"][key]):
                values[metric + ending] = value
    return values


def training_figures(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Return the last losses of a complete training, its seconds and its tokens per second, as metrics."""
    steps = [b.step - a for a, b in zip([0, *(row.step for row in rows)], rows)]
    seconds = sum(count * row.step_seconds for count, row in zip(steps, rows))
    heldout = [row.heldout_loss for row in rows if row.heldout_loss is not None]
    values = {
        "final_loss": rows[-1].loss,
        "final_heldout_loss": heldout[-1] if heldout else None,
        metric_name("train_seconds"): seconds,
        "train_tokens_per_second": rows[-1].tokens / seconds if seconds else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def headline(metrics: Mapping[str, float], scores: Collection[str]) -> list[str]:
    """Return the figures that a person looks for first: score and gain with their intervals, losses, tokens/s. If the
    run has no `score`, the first of `scores` is shown."""
    figures = []
    if name := next((name for name in ("score", *scores) if name in metrics), None):
        ends = [metrics[end] for end in ("score_low", "score_high") if end in metrics and name == "score"]
        figures.append(f"{name} {score_text(metrics[name], tuple(ends) if len(ends) == 2 else None)}")
    if "gain" in metrics:
        figures.append(f"gain {metrics['gain']:+.4f} ({metrics['gain_low']:+.2f} to {metrics['gain_high']:+.2f})")
    losses = {"final_heldout_loss": "held-out loss", "final_loss": "loss"}
    figures += [f"{text} {metrics[name]:.4f}" for name, text in losses.items() if name in metrics]
    if (speed := metrics.get("train_tokens_per_second")) is not None:
        figures.append(f"{speed:,.0f} tokens/s over the training")
    return figures


def log_answers(writer: RunWriter, name: str, rows: list[dict[str, Any]]) -> None:
    """Log answers with their images as a table, unless the table exists: MLflow would append to an existing table."""
    if not rows or any(item.path == name for item in writer.client.list_artifacts(writer.run_id)):
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            picture = Path(folder, f"{number}.png")
            picture.write_bytes(row["image"] or _TEXT_ONLY_PNG)
            row["image"] = mlflow.Image(str(picture))
        writer.client.log_table(writer.run_id, {column: [row[column] for row in rows] for column in rows[0]}, name)


def wrong_first(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Return at most `limit` rows of predictions.parquet, sorted by score, so that wrong answers come first."""
    table = pq.read_table(local_copy(directory / PREDICTIONS))
    order = pc.sort_indices(pc.fill_null(table["score"], 0.0)) if len(table) else []
    return table.take(order[:limit]).to_pylist() if len(table) else []
