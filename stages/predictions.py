"""predictions.parquet: one row an answer of an evaluation, with the picture it was about."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import Sample
from stages.metrics import exact_match

PREDICTIONS = "predictions.parquet"
PREDICTIONS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("turn", pa.int32()),
        ("subset", pa.string()),
        ("question", pa.string()),
        ("reference", pa.string()),
        ("answer", pa.string()),
        ("correct", pa.bool_()),
        ("stopped", pa.bool_()),
        ("num_images", pa.int32()),
        ("image", pa.binary()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One assistant turn of a held-out sample and what the model said there.

    Attributes:
        turn: number of the assistant turn in its sample, from 0.
        question: the user's text before it, without image slots.
        stopped: the model ended its turn by itself.
        num_tokens: generated tokens, without the end-of-turn token.
    """

    key: str
    turn: int
    question: str
    reference: str
    answer: str
    stopped: bool
    num_tokens: int

    @property
    def subset(self) -> str:
        return self.key.split("/", 1)[0]

    @property
    def correct(self) -> bool:
        return exact_match(self.answer, self.reference)


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

    def write(self, window: Sequence[Sample], predictions: Sequence[Prediction]) -> None:
        """Append the predictions of these samples, each with its sample's first image, encoded as it was."""
        images = {sample.key: sample.images for sample in window}
        own = [name for name in PREDICTIONS_SCHEMA.names if name not in ("num_images", "image")]
        rows = [
            {name: getattr(p, name) for name in own}
            | {"num_images": len(images[p.key]), "image": next(iter(images[p.key]), None)}
            for p in predictions
        ]
        self._writer.write_table(pa.Table.from_pylist(rows, schema=PREDICTIONS_SCHEMA))


def read_predictions(directory: Path) -> pa.Table:
    """predictions.parquet of an evaluation, with PREDICTIONS_SCHEMA."""
    return pq.read_table(directory / PREDICTIONS, schema=PREDICTIONS_SCHEMA)
