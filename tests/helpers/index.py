"""A tokenized artifact's index as one table in memory."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.tokenized import INDEX_SCHEMA, PARTITION_ROWS, IndexWriter, iter_index


def read_index(directory: Path) -> pa.Table:
    return pa.concat_tables(iter_index(directory))


def write_index(
    directory: Path, rows: pa.Table | list[dict[str, object]], partition_rows: int = PARTITION_ROWS
) -> None:
    """Write an index of these rows, one per sample, in shard order."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
    shards = table["shard"].to_numpy(zero_copy_only=False)
    starts = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), table.num_rows]
    writer = IndexWriter(directory, partition_rows)
    for start, end in itertools.pairwise(starts):
        writer.add(table.slice(start, end - start))
    writer.close()
