"""Pass 2 of convert: copies the planned samples from the source into shards. And pictures.parquet, which has every
distinct image, frame of a list and video file once, sorted by its SHA-256.

    sha256 (32 bytes, of the encoded bytes), subset, split, key (of the first sample that shows it), width, height
    (pixels, upright), format (Pillow's name; of a video file libavcodec's)

Because of the order, two such files, or a file and a benchmark's list of images, can be compared in one pass.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import SPLITS, Split, subset_of, to_fields
from dataset_builders.contracts.shard_io import ShardWriter, finished_shard
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath
from stages.convert.plan import Plan
from stages.convert.rows import RawRows, change_error
from stages.convert.scan import Scan, scan_path
from stages.shared.artifacts.row_tables import read_columns
from stages.shared.artifacts.workers import StageResources, run_tasks

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
_IDENTITY_COLUMNS = ("key", "digest", "pictures.list.element.sha256", "checksums")


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteTask:
    """One shard to write below `work`."""

    work: StorePath
    name: str  # path below `work`, train/shard-00000.tar
    split: Split
    rows: Mapping[int, np.ndarray]  # part number -> (m,) int64 row numbers in that part's scan, ascending
    source: RawRows  # the parts in `rows`


def write_tasks(work: StorePath, scan: Scan, plan: Plan, source: RawRows) -> Iterator[WriteTask]:
    """Yield one task per planned shard, on request."""
    for shard in plan.shards:
        parts = scan.part_of(shard.rows)
        numbers, begins = np.unique(parts, return_index=True)
        pieces = np.split(shard.rows, begins[1:])
        rows = {int(number): piece - scan.starts[number] for number, piece in zip(numbers, pieces)}
        own_source = RawRows(
            parts={number: source.parts[number] for number in rows},
            readers={number: source.readers[number] for number in rows},
        )
        yield WriteTask(work=work, name=shard.name, split=shard.split, rows=rows, source=own_source)


def write_shard(task: WriteTask) -> ShardEntry:
    """Copy a shard's samples from the source, unless an earlier run did; return the shard's entry."""
    entry = finished_shard(task.work, task.name)
    if entry is not None:
        return entry
    with ShardWriter(task.work, task.name) as writer:
        for number, places in task.rows.items():
            scanned = read_columns(scan_path(task.work, number), _IDENTITY_COLUMNS).take(pa.array(places))
            samples = task.source.read(number, scanned["key"].to_pylist())
            for sample, row in zip(samples, scanned.to_pylist(), strict=True):
                digests = [picture["sha256"].hex() for picture in row["pictures"]]
                checksums = [xxhash.xxh3_64_intdigest(file) for file in sample.files]
                is_same = sample.key == row["key"] and checksums == row["checksums"]
                if not (is_same and sample.digest(digests) == row["digest"].hex()):
                    raise change_error(task.source.parts[number])
                writer.write(sample.key, to_fields(sample, digests))
        return writer.commit(task.split)


def write_all(
    tasks: Iterable[WriteTask], num_samples: int, num_rows: int, resources: StageResources
) -> list[ShardEntry]:
    """Write all shards; return their entries in the order of the tasks. Progress runs from `num_rows` to twice that."""
    entries: dict[int, ShardEntry] = {}
    num_written = 0
    for i, entry in run_tasks(write_shard, tasks, resources):
        entries[i] = entry
        num_written += entry.num_samples
        resources.report(num_rows + num_rows * num_written // num_samples, 2 * num_rows)
    return [entries[i] for i in range(len(entries))]


def distinct_pictures(scan: Scan, plan: Plan) -> pa.Table:
    """Return one row per distinct image, frame or video file of the kept samples, sorted by hash: the fields of a
    scan's picture, and `row` (int64), the first row of the scan that shows it."""
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
