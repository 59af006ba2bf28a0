"""What MLflow shows of data: an artifact as a dataset of the run, and a table of answers beside their pictures."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.tracking_store import connect  # noqa: F401  first: sets what mlflow reads at its import

# isort: split
import mlflow
import pyarrow.compute as pc
import pyarrow.parquet as pq
from mlflow import MlflowClient
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.data.sources import LocalArtifactDatasetSource
from mlflow.entities import DatasetInput, InputTag

from dataset_builders.contracts.store import StorePath, absolute, is_local, local_copy
from stages.artifact import Artifact
from stages.predictions import COMPARISON, PREDICTIONS
from stages.scoring.names import OVERALL

PREDICTIONS_TABLE, COMPARISON_TABLE = "predictions.json", "comparison.json"
MAX_PREDICTIONS = 64
# stage -> what its artifact is to the run
DATASETS: Mapping[str, str] = {
    "embedded_data": "raw",
    "drawn_data": "raw",
    "convert": "samples",
    "tokenize": "training",
    "plan_bins": "training",
}
_TEXT_ONLY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)  # a white pixel, for answers without a picture: a table's image column must have one in every row


def dataset_input(artifact: Artifact) -> DatasetInput:
    """A stage's artifact, by its fingerprint, with its place and counts."""
    manifest = artifact.manifest
    place = str(absolute(artifact.dir))
    source = LocalArtifactDatasetSource(place) if is_local(artifact.dir) else resolve_dataset_source(place)
    dataset = MetaDataset(source, name=manifest.stage, digest=manifest.fingerprint)  # a digest has at most 36 chars
    tags = {"mlflow.data.context": DATASETS[manifest.stage], "num_samples": str(manifest.num_samples)}
    tags |= {"shards_sha256": ",".join(shard.sha256[:12] for shard in manifest.shards)[:500]}
    return DatasetInput(dataset._to_mlflow_entity(), [InputTag(key, value) for key, value in tags.items() if value])


def log_predictions(client: MlflowClient, run_id: str, directory: StorePath, folder: Path) -> None:
    """The table of an evaluation's answers, the wrong ones first.

    Args:
        folder: an empty one, for the pictures.
    """
    _log_table(client, run_id, wrong_first(directory, MAX_PREDICTIONS), PREDICTIONS_TABLE, folder)


def log_comparison(client: MlflowClient, run_id: str, directory: StorePath, folder: Path) -> None:
    """The table of the answers of two models that differ most.

    Args:
        folder: an empty one, for the pictures.
    """
    table = pq.read_table(local_copy(directory / COMPARISON))
    _log_table(client, run_id, table.slice(0, MAX_PREDICTIONS).to_pylist(), COMPARISON_TABLE, folder)


def gain_metrics(subsets: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The stats of a comparison as metrics: `gain`, `gain_low`, `gain_high`, and `gain/<subset>` and so on."""
    values = {}
    for name, found in subsets.items():
        ending = "" if name == OVERALL else f"/{name}"
        for metric, key in (("gain", "difference"), ("gain_low", "low"), ("gain_high", "high")):
            if math.isfinite(value := found["difference"][key]):
                values[metric + ending] = value
    return values


def _log_table(client: MlflowClient, run_id: str, rows: list[dict[str, Any]], name: str, folder: Path) -> None:
    for number, row in enumerate(rows):
        picture = folder / f"{number}.png"
        picture.write_bytes(row["image"] or _TEXT_ONLY_PNG)
        row["image"] = mlflow.Image(str(picture))
    table = {column: [row[column] for row in rows] for column in (rows[0] if rows else {})}
    if table:
        client.log_table(run_id, table, name)


def wrong_first(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Rows of predictions.parquet: wrong answers first, then right ones, in their order, at most `limit`."""
    table = pq.read_table(local_copy(directory / PREDICTIONS))
    order = pc.sort_indices(pc.fill_null(table["score"], 0.0)) if len(table) else []
    return table.take(order[:limit]).to_pylist() if len(table) else []
