"""Drawn rows as parquet files, for a recipe's `data` or a builder. Needs no input and no network.

    chartqa/train-00000-of-00001.parquet  docvqa/  ai2d/  textcaps/  textvqa/  cord_v2/

The schema is the_cauldron's, and each pair of texts has a list `references`, null where there are none.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from tests.helpers.drawn.suite import iter_suite_rows
from tests.helpers.raw_rows import write_parquet

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
