"""pictures.parquet of a convert artifact: every distinct picture once, sorted by its SHA-256.

    sha256 (32 bytes, of the encoded bytes), subset, split, key (of the first sample that shows it), width, height
    (pixels, upright), format (Pillow's name)

Sorted, so that two such files, or one and a list of a benchmark's pictures, are compared by one pass over both.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.store import StorePath
from stages.convert_plan import Plan
from stages.convert_scan import Scan

PICTURES = "pictures.parquet"
PICTURES_SCHEMA = pa.schema(
    [
        ("sha256", pa.binary(32)),
        ("subset", pa.string()),
        ("split", pa.string()),
        ("key", pa.large_string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("format", pa.string()),
    ]
)
_GROUP_ROWS = 1 << 16


def distinct_pictures(scan: Scan, plan: Plan) -> pa.Table:
    """A row a distinct picture of the kept samples, sorted by hash: the fields of a scan's picture, and `row` (int64),
    the scan's row that shows it first."""
    rows = np.flatnonzero(plan.kept)
    pictures = scan.table["pictures"].filter(pa.array(plan.kept))
    row_of_use = np.repeat(rows, pc.list_value_length(pictures).to_numpy())
    uses = pc.list_flatten(pictures).combine_chunks()
    codes = uses.field("sha256").dictionary_encode().indices.to_numpy()
    first_uses = np.unique(codes, return_index=True)[1]
    distinct = uses.take(pa.array(first_uses))
    table = pa.table({field.name: distinct.field(field.name) for field in uses.type})
    order = pc.array_sort_indices(distinct.field("sha256"))
    return table.append_column("row", pa.array(row_of_use[first_uses])).take(order)


def write_pictures(path: StorePath, pictures: pa.Table, scan: Scan, plan: Plan) -> None:
    """Write PICTURES_SCHEMA from `distinct_pictures`, some rows at a time."""
    with atomic_path(path) as tmp, pq.ParquetWriter(tmp, PICTURES_SCHEMA) as writer:
        for begin in range(0, len(pictures), _GROUP_ROWS):
            some = pictures.slice(begin, _GROUP_ROWS)
            keys = scan.table["key"].take(some["row"])
            columns = {
                "sha256": some["sha256"],
                "subset": [key.partition("/")[0] for key in keys.to_pylist()],
                "split": [SPLITS[split] for split in plan.splits[some["row"].to_numpy()]],
                "key": keys,
                **{name: some[name] for name in ("width", "height", "format")},
            }
            writer.write_table(pa.table(columns, schema=PICTURES_SCHEMA))
