"""pictures.parquet of a convert artifact: every distinct image once, sorted by its SHA-256.

    sha256 (32 bytes, of the encoded bytes), subset, split, key (of the first sample that shows it), width, height
    (pixels, upright), format (Pillow's name)

Because of the order, two such files, or a file and a benchmark's list of images, can be compared in one pass.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset_builders.contracts.sample import SPLITS, subset_of
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath
from stages.convert.plan import Plan
from stages.convert.scan import Scan

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
_ROWS_AT_A_TIME = 1 << 16


def distinct_pictures(scan: Scan, plan: Plan) -> pa.Table:
    """Return one row per distinct image of the kept samples, sorted by hash: the fields of a scan's picture, and `row`
    (int64), the first row of the scan that shows it."""
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
    """Write the table of `distinct_pictures` with PICTURES_SCHEMA, some rows at a time."""
    with atomic_path(path) as tmp, pq.ParquetWriter(tmp, PICTURES_SCHEMA) as writer:
        for begin in range(0, len(pictures), _ROWS_AT_A_TIME):
            batch = pictures.slice(begin, _ROWS_AT_A_TIME)
            keys = scan.table["key"].take(batch["row"])
            columns = {
                "sha256": batch["sha256"],
                "subset": [subset_of(key) for key in keys.to_pylist()],
                "split": [SPLITS[split] for split in plan.splits[batch["row"].to_numpy()]],
                "key": keys,
                **{name: batch[name] for name in ("width", "height", "format")},
            }
            writer.write_table(pa.table(columns, schema=PICTURES_SCHEMA))
