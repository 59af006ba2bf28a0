"""predictions.parquet: one row per answer of an evaluation, with its score and the image of the question."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.boxes import TrueBoxes
from dataset_builders.contracts.manifest import canonical_json, fingerprint
from dataset_builders.contracts.sample import Sample, file_digests, subset_of
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath, local_copy
from stages.shared.artifacts.artifact import Artifact

PREDICTIONS = "predictions.parquet"
COMPARISON = "comparison.parquet"  # the comparison of two evaluations: stages/compare/stage.py
PREDICTIONS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("turn", pa.int32()),
        ("subset", pa.string()),
        ("question", pa.string()),
        ("reference", pa.string()),
        ("references", pa.list_(pa.string())),
        ("answer", pa.string()),
        ("boxes", pa.string()),  # TrueBoxes as JSON
        ("metric", pa.string()),
        ("score", pa.float64()),
        ("stopped", pa.bool_()),
        ("num_tokens", pa.int32()),
        ("contaminated", pa.string()),
        ("num_images", pa.int32()),
        ("pictures", pa.list_(pa.string())),
        ("image", pa.binary()),
    ]
)
_OF_THE_SAMPLE = ("metric", "score", "num_images", "pictures", "image")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One assistant turn of a held-out sample, and the model's answer."""

    key: str
    turn: int  # number of the assistant turn in its sample, from 0
    question: str  # the user's text before the turn, without image slots
    reference: str  # the data's answer
    references: tuple[str, ...]  # all answers that count as right; only `reference` if the data has no others
    answer: str
    boxes: TrueBoxes | None  # the right boxes; None if the data has none for this turn, or boxes of several images
    stopped: bool  # whether the model generated an end-of-turn token
    num_tokens: int  # generated, without the end-of-turn token
    contaminated: str | None = None  # how one of its images occurs in train, and no score counts it; None: none does

    @property
    def subset(self) -> str:
        return subset_of(self.key)


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of a single answer."""

    metric: str  # the headline metric of its subset
    # By that metric, converted so that more is better (1 - rate for an error rate); None if the answer has no score.
    score: float | None


@contextmanager
def writing_predictions(directory: Path) -> Iterator[pq.ParquetWriter]:
    """Give a writer of predictions.parquet; the file is published when the block ends without an error."""
    with atomic_path(directory / PREDICTIONS) as tmp, pq.ParquetWriter(tmp, PREDICTIONS_SCHEMA) as writer:
        yield writer


def predictions_table(samples: Sequence[Sample], rows: Sequence[tuple[Prediction, Scored]]) -> pa.Table:
    """Return the rows with PREDICTIONS_SCHEMA, each with its sample's first image as encoded in the data."""
    about = {
        sample.key: {
            "num_images": len(sample.images),
            "pictures": file_digests(sample),
            "image": next(iter(sample.images), None),
        }
        for sample in samples
    }
    own = [name for name in PREDICTIONS_SCHEMA.names if name not in _OF_THE_SAMPLE]
    table = [
        {name: getattr(p, name) for name in own}
        | {"boxes": None if p.boxes is None else p.boxes.to_json(), "metric": s.metric, "score": s.score}
        | about[p.key]
        for p, s in rows
    ]
    return pa.Table.from_pylist(table, schema=PREDICTIONS_SCHEMA)


def read_predictions(directory: StorePath, columns: Sequence[str] | None = None) -> pa.Table:
    """Read predictions.parquet of an evaluation, with PREDICTIONS_SCHEMA; without `columns` all, including images."""
    chosen = None if columns is None else list(columns)
    return pq.read_table(local_copy(directory / PREDICTIONS), columns=chosen, schema=PREDICTIONS_SCHEMA)


def counted(predictions: pa.Table) -> pa.Table:
    """Return the predictions that scores count: those without an image that occurs in the training split."""
    return predictions.filter(pc.is_null(predictions["contaminated"]))


def heldout_fingerprint(evaluated: Artifact) -> str:
    """Return 16 hex digits that identify the subject of an evaluation's scores: the counted questions, their right
    answers and images, and the metrics. They do not depend on the model or on the path of the root."""
    columns = ["subset", "turn", "question", "references", "pictures"]
    rows = counted(read_predictions(evaluated.dir, [*columns, "contaminated"])).select(columns).to_pylist()
    metrics_of = evaluated.manifest.stats["metrics"]  # as they are, without the libraries that compute them
    metrics = {
        name: [metrics_of[name]["headline"], *metrics_of[name]["others"]] for name in {r["subset"] for r in rows}
    }
    return fingerprint({"rows": sorted(rows, key=canonical_json), "metrics": metrics})
