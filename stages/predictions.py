"""predictions.parquet: one row an answer of an evaluation, with its score and the picture it was about."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import Sample, image_digests
from dataset_builders.contracts.store import StorePath, local_copy

PREDICTIONS = "predictions.parquet"
COMPARISON = "comparison.parquet"  # of two evaluations: stages/compare.py
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
    """One assistant turn of a held-out sample and what the model said there.

    Attributes:
        turn: number of the assistant turn in its sample, from 0.
        question: the user's text before it, without image slots.
        reference: what the data says there.
        references: all answers that count as right, `reference` alone where the data has no others.
        stopped: the model ended its turn by itself.
        num_tokens: generated tokens, without the end-of-turn token.
        contaminated: how a picture of its sample occurs in train, so that no score counts it; None where none does.
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
        return self.key.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of an answer alone.

    Attributes:
        metric: the headline metric of its subset.
        score: by it, upwards (an error rate as 1 - rate); None where the answer has none.
    """

    metric: str
    score: float | None


class PredictionsWriter:
    """Writes predictions.parquet window by window; it appears, whole, when the block ends without an error."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / PREDICTIONS
        self._open = ExitStack()

    def __enter__(self) -> "PredictionsWriter":
        tmp = self._open.enter_context(atomic_path(self._path))
        self._writer = self._open.enter_context(pq.ParquetWriter(tmp, PREDICTIONS_SCHEMA))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)

    def write(self, window: Sequence[Sample], rows: Sequence[tuple[Prediction, Scored]]) -> None:
        """Append the predictions of these samples, each with its sample's first image, encoded as it was."""
        about = {sample.key: _about(sample) for sample in window}
        own = [name for name in PREDICTIONS_SCHEMA.names if name not in _OF_THE_SAMPLE]
        table = [
            {name: getattr(p, name) for name in own} | {"metric": s.metric, "score": s.score} | about[p.key]
            for p, s in rows
        ]
        self._writer.write_table(pa.Table.from_pylist(table, schema=PREDICTIONS_SCHEMA))


def _about(sample: Sample) -> Mapping[str, object]:
    return {
        "num_images": len(sample.images),
        "pictures": image_digests(sample),
        "image": next(iter(sample.images), None),
    }


def read_predictions(directory: StorePath, columns: Sequence[str] | None = None) -> pa.Table:
    """predictions.parquet of an evaluation, with PREDICTIONS_SCHEMA.

    Args:
        columns: names of those that are read; None: all, pictures too.
    """
    chosen = None if columns is None else list(columns)
    return pq.read_table(local_copy(directory / PREDICTIONS), columns=chosen, schema=PREDICTIONS_SCHEMA)


def counted(predictions: pa.Table) -> pa.Table:
    """Those that scores count: of samples without a picture that occurs in train."""
    return predictions.filter(pc.is_null(predictions["contaminated"]))
