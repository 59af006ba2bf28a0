"""Data in MLflow: an artifact as a dataset of the run, a table of answers with their images, headline figures."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.tracking.store import connect  # noqa: F401  before mlflow: sets variables that mlflow reads at its import

# isort: split
import mlflow
import pyarrow.compute as pc
import pyarrow.parquet as pq
from mlflow import MlflowClient
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.data.sources import LocalArtifactDatasetSource
from mlflow.entities import DatasetInput, InputTag

from dataset_builders.storage.store import StorePath, absolute, is_local, local_copy
from flows.libraries.mlflow_private import entity_of
from flows.tracking.notes import score_text
from flows.tracking.run_writer import metric_name
from stages.artifacts.artifact import Artifact
from stages.evaluate.predictions import COMPARISON, PREDICTIONS
from stages.scoring.names import OVERALL
from trainer.contract.answer import MetricsRow, read_metrics

PREDICTIONS_TABLE, COMPARISON_TABLE = "predictions.json", "comparison.json"
MAX_ANSWERS = 64
_TEXT_ONLY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)  # a white pixel for answers without an image, because a table's image column needs an image in every row


def dataset_input(artifact: Artifact, context: str) -> DatasetInput:
    """Return a stage's artifact as an input of the run: its fingerprint, address and counts.

    Args:
        context: the artifact's use in the run, for example "training".
    """
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


def score_interval(evaluated: Artifact) -> dict[str, float]:
    """Return the ends of the interval of an evaluation's `score`, as metrics."""
    ends = evaluated.manifest.stats.get("headlines", {}).get(OVERALL, {})
    return {f"score_{end}": ends[end] for end in ("low", "high") if ends.get(end) is not None}


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


def headline(evaluated: Artifact | None, artifacts: Sequence[Artifact]) -> list[str]:
    """Return the figures that a person looks for first: score and gain with their intervals, losses, tokens/s.

    Args:
        evaluated: scores of the trained model.
        artifacts: all artifacts of the run; the comparison and the training among them are recognised by their files.
    """
    figures = []
    scores = {} if evaluated is None else evaluated.manifest.stats["scores"].get(OVERALL, {})
    if name := next((name for name in ("score", *scores) if scores.get(name) is not None), None):
        ends = score_interval(evaluated) if name == "score" else {}
        figures.append(f"{name} {score_text(scores[name], tuple(ends.values()) if len(ends) == 2 else None)}")
    for artifact in artifacts:
        if (artifact.dir / COMPARISON).is_file():
            gain = gain_metrics(artifact.manifest.stats["subsets"])
            if "gain" in gain:
                figures.append(f"gain {gain['gain']:+.4f} ({gain['gain_low']:+.2f} to {gain['gain_high']:+.2f})")
        elif rows := read_metrics(artifact.dir):
            values = training_figures(rows)
            names = {"final_heldout_loss": "held-out loss", "final_loss": "loss"}
            figures += [f"{name} {values[key]:.4f}" for key, name in names.items() if key in values]
            figures += [
                f"{values[key]:,.0f} tokens/s over the training"
                for key in ("train_tokens_per_second",)
                if key in values
            ]
    return sorted(figures, key=lambda text: (text not in figures[:1], not text.startswith("gain")))


def log_answers(client: MlflowClient, run_id: str, name: str, rows: list[dict[str, Any]]) -> None:
    """Log answers with their images as a table, unless the table exists: MLflow would append to an existing table."""
    if not rows or any(item.path == name for item in client.list_artifacts(run_id)):
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            picture = Path(folder, f"{number}.png")
            picture.write_bytes(row["image"] or _TEXT_ONLY_PNG)
            row["image"] = mlflow.Image(str(picture))
        client.log_table(run_id, {column: [row[column] for row in rows] for column in rows[0]}, name)


def most_different(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Return the first rows of comparison.parquet, at most `limit`. The answers that differ most come first."""
    return pq.read_table(local_copy(directory / COMPARISON)).slice(0, limit).to_pylist()


def wrong_first(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Return at most `limit` rows of predictions.parquet, sorted by score, so that wrong answers come first."""
    table = pq.read_table(local_copy(directory / PREDICTIONS))
    order = pc.sort_indices(pc.fill_null(table["score"], 0.0)) if len(table) else []
    return table.take(order[:limit]).to_pylist() if len(table) else []
