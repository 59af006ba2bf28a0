"""The parts of a run in MLflow: its recipe, its stages with their curves and files, its model, its description and end.

Each part is a function that adds the part's content. `publish.py` says when a part is to be added.
"""

import contextlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pyarrow.compute as pc
import pyarrow.parquet as pq
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.data.sources import LocalArtifactDatasetSource
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.types.schema import Array, ColSpec, DataType, Object, Property, Schema

from dataset_builders.contracts.manifest import MANIFEST, fingerprint, flatten
from dataset_builders.storage.files import GrowingFile
from dataset_builders.storage.store import StorePath, absolute, is_local, local_copy, modified
from flows.libraries.mlflow_private import VIEW_TAG, first_view
from flows.tracking.notes import NOTE_TAG, WARNING_TAG, experiment_note, run_note, score_text
from flows.tracking.record import (
    Registration,
    StageEntry,
    TrackedRun,
    find_place,
    live_path,
    now_ms,
    samples_path,
    save_learnt,
)
from flows.tracking.registry import MODEL_TAG, REASON_TAG, log_model, register_model, standing
from flows.tracking.run_writer import (
    FINGERPRINT,
    REFERENCES,
    FilePlace,
    RunWriter,
    chosen_files,
    metric_name,
    references,
    sizes_of,
    thinned,
)
from flows.tracking.store import tracking_uri
from flows.tracking.system import CPU_METRIC
from stages.evaluate.predictions import COMPARISON, PREDICTIONS, read_predictions
from stages.release.flavor import FLAVOR_FILES
from stages.shared.artifacts.artifact import Artifact
from stages.shared.scoring.names import OVERALL, flat_scores
from trainer.contract.result import MetricsRow, read_metrics

_LOSS = "loss"  # a metric of every row of a training
RECIPE_YAML, EXECUTION_YAML = "recipe.yaml", "execution.yaml"
PREDICTIONS_TABLE, COMPARISON_TABLE = "predictions.json", "comparison.json"
ANSWERS_TABLE = "answers.json"  # logged first, so that MLflow's view of several runs side by side opens with it
_FIRST_COLUMNS = ("image", "question", "reference", "answer", "base", "tuned", "score", "gain")  # of both tables
MAX_ANSWERS, MAX_SIDE_BY_SIDE = 64, 200
COMPARED_RUNS = 8
_MAX_DATA_NAME = 500  # characters that MLflow stores
# The samples of `dataset_builders/contracts/sample.py`.
_MESSAGE = Object([Property("role", DataType.string), Property("text", DataType.string)])
_SAMPLES = Schema(
    [
        ColSpec(DataType.string, "key"),
        ColSpec(Array(_MESSAGE), "messages"),
        ColSpec(Array(DataType.binary), "images"),
    ]
)
_TEXT_ONLY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)  # a white pixel for answers without an image, because a table's image column needs an image in every row


@dataclass(slots=True)
class FollowedRows:
    """A file whose lines are rows of metrics, as far as MLflow has them, and the step of the last row that was read."""

    file: GrowingFile
    step: int = 0


@dataclass(slots=True)
class OpenRun:
    """A run that MLflow has, its record, and what was read and sent of it so far.

    Attributes:
        announce: function that is called before an upload with the seconds that the upload may take.
        sent: kind of content that was added -> number.
        followed: files with rows of metrics, as far as they were read.
        held_files: stage -> names of its files that the run holds.
    """

    root: StorePath
    key: str
    record: TrackedRun
    writer: RunWriter
    announce: Callable[[float], None]
    sent: Counter[str]
    followed: dict[Path, FollowedRows] = field(default_factory=dict)
    held_files: dict[str, list[str]] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        """Note that content of a kind was added."""
        self.sent.update({what: number} if number else {})


def parts_of(run: OpenRun) -> Iterator[tuple[str, str | None, Callable[[], None]]]:
    """Yield name, state and function of each part, in order. A part without a state is looked at each time."""
    opening, registration = run.record.opening, run.record.registration
    texts = opening.model_dump_json(include={"params", "recipe_yaml", "execution_yaml"})
    yield "recipe", fingerprint(texts), partial(_recipe, run)
    yield "tags", None, lambda: run.writer.set_tags(opening.tags)
    for name, entry in run.record.stages.items():
        yield f"stage {name}", f"{entry.fingerprint} {opening.artifacts}", partial(_stage, run, name, entry)
    yield "metrics", None, partial(add_live_rows, run)
    if registration is not None:
        asked = [registration.model_dump_json(), opening.registry.model_dump_json(), opening.artifacts]
        yield "model", registration.exported, partial(log_model, run.writer, run.root, registration)
        yield "scores", registration.evaluated, partial(_scores, run, registration)
        yield "registration", fingerprint(asked), partial(_register, run, registration)
    yield "description", None, partial(_describe, run)
    if run.record.status is not None:
        yield "end", None, partial(_end, run)


def _recipe(run: OpenRun) -> None:
    writer, opening = run.writer, run.record.opening
    writer.log_params(flatten(opening.params))
    for name, text in ((RECIPE_YAML, opening.recipe_yaml), (EXECUTION_YAML, opening.execution_yaml)):
        if text:
            writer.client.log_text(writer.run_id, text, name)
    run.count("recipe")


def _stage(run: OpenRun, name: str, entry: StageEntry) -> None:
    """Add a stage: its curves or differences, a dataset of the run if the stage makes data, its files."""
    writer, artifact = run.writer, Artifact.load(find_place(run.root, entry.dir))
    made_ms = _made_ms(artifact)
    if rows := read_metrics(artifact.dir):
        # The rows that the live metrics have missed, and the headline figures of the complete training.
        chosen = thinned([row.model_dump() for row in rows], rows[-1].step)
        run.count("step", writer.log_rows(chosen, made_ms, _LOSS))
        writer.log_metrics(training_figures(rows), rows[-1].time_ms or made_ms, rows[-1].step)
    if name == "evaluate" and not _has_table(writer, ANSWERS_TABLE):
        writer.client.log_table(writer.run_id, side_by_side(artifact.dir, MAX_SIDE_BY_SIDE), ANSWERS_TABLE)
    if (artifact.dir / COMPARISON).is_file():
        writer.log_metrics(gain_metrics(artifact.manifest.stats["subsets"]), made_ms)
        differing = pq.read_table(local_copy(artifact.dir / COMPARISON))  # the most different answers come first
        log_answers(writer, COMPARISON_TABLE, differing.slice(0, MAX_ANSWERS).to_pylist())
    if entry.dataset is not None:
        writer.client.log_inputs(writer.run_id, [dataset_input(artifact, _data_name(run), entry.dataset)])
    writer.set_tags({f"{FINGERPRINT}{name}": entry.fingerprint})
    run.count("stage")
    folder, sizes = f"stages/{name}", sizes_of(artifact.dir)
    chosen = chosen_files(artifact, run.record.opening.artifacts, sizes)
    files = {file: sizes[file] for file in chosen}
    before = partial(_before_upload, run)
    run.count("file", FilePlace.of_run(writer).send(artifact.dir, files, folder, before))
    if len(chosen) < len(sizes):
        text = references(artifact, entry.dir, sizes, chosen)
        writer.client.log_text(writer.run_id, text, f"{folder}/{REFERENCES}")
    run.held_files.pop(name, None)


def _before_upload(run: OpenRun, seconds: float) -> None:
    """Add the newest training metrics, which would wait for the upload, and announce how long the upload may take."""
    add_live_rows(run)
    run.announce(seconds)


def add_live_rows(run: OpenRun) -> None:
    """Add the new lines of the running training's metrics.jsonl, and the new samples of its machine."""
    path = live_path(run.root, run.record)
    if path is None:
        return
    run.count("step", _follow(run, path, _LOSS, run.record.live.num_steps))
    if run.writer.steps.get(_LOSS) or run.record.status is not None:
        # Not earlier, since MLflow's compare page begins with the first metric that a run got.
        run.count("machine sample", _follow(run, samples_path(run.root, run.key), CPU_METRIC))


def _follow(run: OpenRun, path: Path, metric: str, num_steps: int | None = None) -> int:
    """Add the new lines of a file whose lines are rows of metrics, and return the number of rows that were added.

    Args:
        num_steps: number of steps of the training whose rows these are; None: every row is added.
    """
    followed, rows = run.followed.setdefault(path, FollowedRows(GrowingFile(path))), []
    for line in followed.file.new_lines().splitlines():
        with contextlib.suppress(ValueError):  # a crash has cut the line short
            rows.append(json.loads(line))
    chosen = rows if num_steps is None else thinned(rows, num_steps, followed.step)
    number = run.writer.log_rows(chosen, run.record.changed_ms, metric)
    followed.file.take()  # only now, so that lines that MLflow did not take are read again
    followed.step = rows[-1]["step"] if rows else followed.step
    return number


def _scores(run: OpenRun, registration: Registration) -> None:
    """Add the scores of every subset (overall scores under bare names), and a table of answers, wrong first."""
    writer, evaluation = run.writer, Artifact.load(find_place(run.root, registration.evaluated))
    about = {}
    if model_id := writer.tags.get(MODEL_TAG):
        samples = evaluation.manifest.parents["samples"]
        about = {"model_id": model_id, "dataset_name": _data_name(run), "dataset_digest": samples.fingerprint}
    interval = evaluation.manifest.stats.get("headlines", {}).get(OVERALL, {})
    ends = {f"score_{end}": interval[end] for end in ("low", "high") if interval.get(end) is not None}
    writer.log_metrics(flat_scores(registration.scores) | ends, _made_ms(evaluation), **about)
    log_answers(writer, PREDICTIONS_TABLE, wrong_first(evaluation.dir, MAX_ANSWERS))
    if warnings := evaluation.manifest.stats.get("warnings"):
        writer.set_tags({WARNING_TAG: "; ".join(warnings)})
    run.count("score table")


def _register(run: OpenRun, registration: Registration) -> None:
    """Give the model its files, and then register it, so that a version always has complete files."""
    writer, opening, learnt = run.writer, run.record.opening, run.record.learnt
    if registration.refusals:
        writer.set_tags({REASON_TAG: f"not registered: {'; '.join(registration.refusals)}"})
        return
    model_id, hf_dir = writer.tags[MODEL_TAG], find_place(run.root, registration.hf_dir)
    place, may_upload = FilePlace.of_model(writer.client, model_id), opening.artifacts != "references"
    # The files are MLflow's flavor and hf/, a directory that transformers loads. They stay where they are if they are
    # in a store while MLflow keeps its files on this machine, or if the level is `references` and no hard link is
    # possible.
    has_files = False
    if is_local(hf_dir) or (may_upload and place.local_dir() is None):
        release, sizes = hf_dir.parent, sizes_of(hf_dir.parent)
        files = {name: sizes[name] for name in sizes if name.startswith(f"{hf_dir.name}/") or name in FLAVOR_FILES}
        has_files = place.send(release, files, "", partial(_before_upload, run), may_upload) is not None
    source = f"models:/{model_id}"
    if not tracking_uri(run.root).startswith("http"):  # without a server MLflow cannot resolve that
        source = place.address if has_files else hf_dir.parent.as_uri()
    if register_model(writer, run.root, registration, source, opening):
        learnt.decided_ms = now_ms()
        save_learnt(run.root, run.key, learnt)
        run.count("model")


def _describe(run: OpenRun) -> None:
    record, writer = run.record, run.writer
    registration, learnt, decision = record.registration, record.learnt, writer.tags.get(REASON_TAG)
    learnt.verdict = decision or ""
    if registration and not registration.refusals and learnt.decided_ms < record.opened_ms:
        learnt.verdict = standing(writer)  # an earlier try decided on the model
    for name in record.stages.keys() - run.held_files.keys():
        listed = writer.client.list_artifacts(writer.run_id, f"stages/{name}")
        run.held_files[name] = [Path(item.path).name for item in listed]
    stages = {name: (entry.dir, run.held_files[name]) for name, entry in record.stages.items()}
    scores = registration.scores if registration else {}
    figures = headline(writer.client.get_run(writer.run_id).data.metrics, scores.get(OVERALL, {}))
    warning = writer.tags.get(WARNING_TAG)
    writer.set_tags({NOTE_TAG: run_note(record.opening.note, writer.page, stages, scores, decision, figures, warning)})


def _end(run: OpenRun) -> None:
    """End the run: FINISHED, FAILED or KILLED. A run that was finished before keeps its times."""
    writer, record = run.writer, run.record
    if writer.status != "FINISHED" and (writer.status, writer.end_ms) != (record.status, record.ended_ms):
        seconds = (record.ended_ms - record.opened_ms) / 1e3
        writer.log_metrics({metric_name("flow_seconds"): seconds}, record.ended_ms)
        writer.client.set_terminated(writer.run_id, record.status, record.ended_ms)
        run.count("end")
    newest = []  # finished runs on the same data, this run included; none if this run has no samples yet
    if (samples := record.stages.get("convert")) is not None:
        alike = f"attributes.status = 'FINISHED' AND tags.`{FINGERPRINT}convert` = '{samples.fingerprint}'"
        order = ["attributes.start_time DESC"]
        newest = writer.client.search_runs([writer.experiment_id], alike, 1, COMPARED_RUNS, order)
    ids = [each.info.run_id for each in newest]
    if len(ids) > 1:
        note = experiment_note([each.info.run_name for each in newest], ids, writer.experiment_id)
        writer.client.set_experiment_tag(writer.experiment_id, NOTE_TAG, note)
        writer.client.set_experiment_tag(writer.experiment_id, VIEW_TAG, json.dumps(first_view()))
    record.learnt.compare = next((other for other in ids if other != writer.run_id), None)


def _made_ms(artifact: Artifact) -> int:
    """Return the time at which an artifact was made, for metrics without a time, in milliseconds since 1970."""
    return int(modified(artifact.dir / MANIFEST) * 1000)


def _data_name(run: OpenRun) -> str:
    return run.record.opening.tags.get("athanor.data", "data")[:_MAX_DATA_NAME]


def dataset_input(artifact: Artifact, name: str, context: str) -> DatasetInput:
    """Return an artifact with samples as an input of the run, with its fingerprint, address, schema and counts.

    Args:
        name: name of the data.
        context: the use of the data in the run, for example "samples".
    """
    manifest, counts = artifact.manifest, Counter()
    for shard in manifest.shards:
        counts[f"{shard.split}_samples"] += shard.num_samples
    profile = {**counts, "subsets": len(manifest.stats.get("samples", ()))}
    profile |= {f"{split}_distinct_images": n for split, n in manifest.stats.get("pictures", {}).items()}
    profile["left_out"] = sum(manifest.skips.values())
    place = str(absolute(artifact.dir))
    source = LocalArtifactDatasetSource(place) if is_local(artifact.dir) else resolve_dataset_source(place)
    facts = MetaDataset(source, name, manifest.fingerprint, _SAMPLES).to_dict()  # a digest has at most 36 characters
    tags = {"mlflow.data.context": context}
    tags |= {"shards_sha256": ",".join(shard.sha256[:12] for shard in manifest.shards)[:500]}
    entity = Dataset(**facts, profile=json.dumps(profile))
    return DatasetInput(entity, [InputTag(key, value) for key, value in tags.items() if value])


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
    """Log answers with their images as a table, whose columns begin with those that a person reads, unless the table
    exists: MLflow would append to an existing table."""
    if not rows or _has_table(writer, name):
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            picture = Path(folder, f"{number}.png")
            picture.write_bytes(row["image"] or _TEXT_ONLY_PNG)
            row["image"] = mlflow.Image(str(picture))
        columns = dict.fromkeys([*(column for column in _FIRST_COLUMNS if column in rows[0]), *rows[0]])
        writer.client.log_table(writer.run_id, {column: [row[column] for row in rows] for column in columns}, name)


def _has_table(writer: RunWriter, name: str) -> bool:
    return any(item.path == name for item in writer.client.list_artifacts(writer.run_id))


def side_by_side(directory: StorePath, limit: int) -> dict[str, list[Any]]:
    """Return the columns of at most `limit` answers, which are those of the same samples for every model that was asked
    the same held-out samples. MLflow's view of several runs has a row for each `sample`."""
    table = read_predictions(directory, ("key", "turn", "question", "answer", "reference", "score"))
    rows = table.to_pylist()[:: max(1, math.ceil(len(table) / limit))]
    samples = [f"{row['key']}:{row['turn']} {row['question']} Reference: {row['reference']}" for row in rows]
    return {"sample": samples} | {name: [row[name] for row in rows] for name in ("answer", "score")}


def wrong_first(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Return at most `limit` rows of predictions.parquet, sorted by score, so that wrong answers come first."""
    table = pq.read_table(local_copy(directory / PREDICTIONS))
    order = pc.sort_indices(pc.fill_null(table["score"], 0.0)) if len(table) else []
    return table.take(order[:limit]).to_pylist() if len(table) else []
