"""Tables of rows that a stage keeps on disk while it works."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath, local_copy

_ROWS_AT_A_TIME = 2048


def write_rows(path: StorePath, rows: Iterable[Mapping[str, object]], schema: pa.Schema) -> None:
    """Write a parquet file atomically, with a few rows in memory at a time."""
    rest: Iterator[Mapping[str, object]] = iter(rows)
    with atomic_path(path) as tmp, pq.ParquetWriter(tmp, schema) as writer:
        while batch := list(islice(rest, _ROWS_AT_A_TIME)):
            writer.write_table(pa.Table.from_pylist(batch, schema))


def read_columns(path: StorePath, columns: Sequence[str]) -> pa.Table:
    """Read some columns of a parquet file."""
    with pq.ParquetFile(local_copy(path)) as file:
        return file.read(columns=list(columns))
