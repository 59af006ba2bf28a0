"""Drawn rows as parquet files, for a recipe's `data` or a builder. Needs no input and no network.

write_suite     chartqa/train-00000-of-00001.parquet  docvqa/  ai2d/  textcaps/  textvqa/  cord_v2/
                the_cauldron's schema, and in each pair of texts a list `references`, null where there are none
write_receipts  data/train-00000-of-00001.parquet  data/validation-...  data/test-...
                only receipts, in CORD-V2's schema, for the builder cord_v2
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from tests.helpers.drawn.suite import iter_cord_splits, iter_suite_rows
from tests.helpers.raw_rows import CORD_SCHEMA, write_parquet

_GROUP_ROWS = 100
SUITE_YAML = Path(__file__).with_name("suite.yaml")
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_TEXT = [("user", pa.string()), ("assistant", pa.string()), ("source", pa.string())]
ROW_SCHEMA = pa.schema(
    [
        ("images", pa.list_(_IMAGE)),
        ("texts", pa.list_(pa.struct([*_TEXT, ("references", pa.list_(pa.string()))]))),
    ]
)


def write_suite(directory: Path, counts: Mapping[str, int], seed: int = 0) -> Path:
    """Write rows of every subset in `counts`, one directory per subset. Return the directory, for `data`."""
    subsets: dict[str, list] = {}
    for subset, row in iter_suite_rows(seed, counts):
        subsets.setdefault(subset, []).append(row)
    for subset, rows in subsets.items():
        write_parquet(directory / subset / "train-00000-of-00001.parquet", rows, _GROUP_ROWS, ROW_SCHEMA)
    return directory


def write_receipts(directory: Path, count: int, seed: int = 0) -> Path:
    """Write `count` receipts in three splits. Return the directory, for `data`."""
    splits: dict[str, list] = {}
    for split, row in iter_cord_splits(seed, count):
        splits.setdefault(split, []).append(row)
    for split, rows in splits.items():
        write_parquet(directory / "data" / f"{split}-00000-of-00001.parquet", rows, _GROUP_ROWS, CORD_SCHEMA)
    return directory
