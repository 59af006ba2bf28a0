"""predictions.parquet: one row per answer of an evaluation, with its score and the picture of the question."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.fingerprint import canonical_json, fingerprint
from dataset_builders.contracts.sample import Sample, image_digests, subset_of
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath, local_copy
from stages.artifacts.artifact import Artifact

PREDICTIONS = "predictions.parquet"
COMPARISON = "comparison.parquet"  # of two evaluations: stages/compare/stage.py
PREDICTIONS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("turn", pa.int32()),
        ("subset", pa.string()),
        ("question", pa.string()),
        ("reference", pa.string()),
        ("references", pa.list_(pa.string())),
        ("answer", pa.string()),
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
    """One assistant turn of a held-out sample and the model's answer there.

    Attributes:
        turn: number of the assistant turn in its sample, from 0.
        question: the user's text before it, without image slots.
        reference: the data's answer.
        references: all answers that count as right; `reference` alone if the data has no others.
        stopped: the model ended its turn by itself.
        num_tokens: generated tokens, without the end-of-turn token.
        contaminated: how a picture of its sample occurs in train, so that no score counts it; None if no picture does.
    """

    key: str
    turn: int
    question: str
    reference: str
    references: tuple[str, ...]
    answer: str
    stopped: bool
    num_tokens: int
    contaminated: str | None = None

    @property
    def subset(self) -> str:
        return subset_of(self.key)


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of a single answer.

    Attributes:
        metric: the headline metric of its subset.
        score: by that metric, turned so that more is better (1 - rate for an error rate); None if the answer has no
            score.
    """

    metric: str
    score: float | None


@contextmanager
def writing_predictions(directory: Path) -> Iterator[pq.ParquetWriter]:
    """A writer of predictions.parquet, which appears whole, when the block ends without an error."""
    with atomic_path(directory / PREDICTIONS) as tmp, pq.ParquetWriter(tmp, PREDICTIONS_SCHEMA) as writer:
        yield writer


def predictions_table(samples: Sequence[Sample], rows: Sequence[tuple[Prediction, Scored]]) -> pa.Table:
    """The rows with PREDICTIONS_SCHEMA, each with its sample's first image as the data encodes it."""
    about = {
        sample.key: {
            "num_images": len(sample.images),
            "pictures": image_digests(sample),
            "image": next(iter(sample.images), None),
        }
        for sample in samples
    }
    own = [name for name in PREDICTIONS_SCHEMA.names if name not in _OF_THE_SAMPLE]
    table = [
        {name: getattr(p, name) for name in own} | {"metric": s.metric, "score": s.score} | about[p.key]
        for p, s in rows
    ]
    return pa.Table.from_pylist(table, schema=PREDICTIONS_SCHEMA)


def read_predictions(directory: StorePath, columns: Sequence[str] | None = None) -> pa.Table:
    """predictions.parquet of an evaluation, with PREDICTIONS_SCHEMA.

    Args:
        columns: names of the columns to read; None: all, pictures too.
    """
    chosen = None if columns is None else list(columns)
    return pq.read_table(local_copy(directory / PREDICTIONS), columns=chosen, schema=PREDICTIONS_SCHEMA)


def counted(predictions: pa.Table) -> pa.Table:
    """The predictions that scores count: those of samples without a picture that occurs in train."""
    return predictions.filter(pc.is_null(predictions["contaminated"]))


def heldout_fingerprint(evaluated: Artifact) -> str:
    """16 hex digits that name what the scores of an evaluation are of: the questions that count, their right answers
    and pictures, and the metrics. They depend neither on the model nor on the place of the root."""
    columns = ["subset", "turn", "question", "references", "pictures", "metric"]
    rows = counted(read_predictions(evaluated.dir, [*columns, "contaminated"])).select(columns).to_pylist()
    metrics = evaluated.manifest.config.get("metrics", {})
    return fingerprint({"rows": sorted(rows, key=canonical_json), "metrics": metrics})
