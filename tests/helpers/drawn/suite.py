"""The drawn suite: six small sets in the formats of chartqa, docvqa, ai2d, textcaps, textvqa and CORD-V2.

Each set is for one metric: relaxed accuracy, ANLS, multiple choice, captions, VQA accuracy over ten annotators, trees
of
a receipt. A set's rows depend only on the seed and the set, and its first rows do not depend on the number of rows. No
two rows of a set show the same image.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from dataset_builders.sources.cord_v2 import SPLITS, SourceSplit
from tests.helpers.drawn.charts import iter_chart_rows
from tests.helpers.drawn.diagrams import iter_diagram_rows
from tests.helpers.drawn.pages import iter_page_rows
from tests.helpers.drawn.receipts import CordRow, iter_cord_rows, iter_receipt_rows
from tests.helpers.drawn.rows import Row
from tests.helpers.drawn.scenes import iter_annotated_rows, iter_caption_rows

# subset -> (seed, stream) -> endless rows; the index in this table is a subset's stream, so new subsets are appended
_SETS: dict[str, Callable[[int, int], Iterator[Row]]] = {
    "chartqa": iter_chart_rows,
    "docvqa": iter_page_rows,
    "ai2d": iter_diagram_rows,
    "textcaps": iter_caption_rows,
    "textvqa": iter_annotated_rows,
    "cord_v2": iter_receipt_rows,
}
SUBSETS = tuple(_SETS)
_CORD_SHARES = {"train": 0.8, "validation": 0.1}  # as in CORD-V2; the test split is the rest
_CORD_STREAM = 100


def iter_suite_rows(seed: int, counts: Mapping[str, int]) -> Iterator[tuple[str, Row]]:
    """Yield (subset, row) in the order of SUBSETS, in the_cauldron's schema with an additional list of references.

    Args:
        counts: number of rows of each subset; a subset that is not named has no rows.
    """
    for stream, (subset, rows_of) in enumerate(_SETS.items()):
        rows = _distinct(rows_of(seed, stream))
        yield from ((subset, row) for row in itertools.islice(rows, counts.get(subset, 0)))


def iter_cord_splits(seed: int, count: int) -> Iterator[tuple[SourceSplit, CordRow]]:
    """Yield (split, row) of `count` receipts in CORD-V2's schema: 80 % train, 10 % validation, 10 % test."""
    left = count
    for stream, split in enumerate(SPLITS):
        share = round(count * _CORD_SHARES[split]) if split in _CORD_SHARES else left
        share = min(share, left)
        left -= share
        rows = iter_cord_rows(seed, _CORD_STREAM + stream, split)
        yield from ((split, row) for row in itertools.islice(rows, share))


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows whose image did not occur before."""
    seen = set()
    for row in rows:
        picture = row["images"][0]["bytes"]
        if picture not in seen:
            seen.add(picture)
            yield row
