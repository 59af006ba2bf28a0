"""What MLflow shows of data: an artifact as a dataset of the run, and a table of answers beside their pictures."""

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

PREDICTIONS_TABLE = "predictions.json"
MAX_PREDICTIONS = 64
# stage -> what its artifact is to the run
DATASETS: Mapping[str, str] = {
    "embedded_data": "raw",
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
    rows = wrong_first(directory, MAX_PREDICTIONS)
    for number, row in enumerate(rows):
        picture = folder / f"{number}.png"
        picture.write_bytes(row["image"] or _TEXT_ONLY_PNG)
        row["image"] = mlflow.Image(str(picture))
    table = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    if table:
        client.log_table(run_id, table, PREDICTIONS_TABLE)


def wrong_first(directory: StorePath, limit: int) -> list[dict[str, Any]]:
    """Rows of predictions.parquet: wrong answers first, then right ones, in their order, at most `limit`."""
    table = pq.read_table(local_copy(directory / "predictions.parquet"))
    correct = pc.fill_null(pc.cast(table["correct"], "float64"), 0.0)
    order = pc.sort_indices(correct) if len(table) else []
    return table.take(order[:limit]).to_pylist() if len(table) else []
