"""Pass 2 of convert: copies the planned samples from the source into shards."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import Sample, Split, to_fields
from dataset_builders.contracts.shard_io import ShardWriter, finished_shard
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.readers.parts import Part
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath
from stages.convert.plan import Plan
from stages.convert.scan import Scan, scan_path
from stages.shared.artifacts.row_tables import read_columns
from stages.shared.artifacts.workers import StageResources, run_tasks

_IDENTITY_COLUMNS = ("key", "digest", "pictures.list.element.sha256", "checksums")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRows:
    """Parts of the sources by number, and the builders that read their rows."""

    parts: Mapping[int, Part]
    readers: Mapping[int, tuple[str, StrictModel]]  # name of the part's builder, and its options

    def read(self, number: int, keys: Sequence[str]) -> Iterator[Sample]:
        """Yield the samples of a part with these keys, in the order of the source."""
        part, (builder, options), chosen_keys = self.parts[number], self.readers[number], set(keys)
        num_samples = 0
        for item in get_builder(builder).iter_part(part, options, {part.row(key) for key in keys}):
            if isinstance(item, Sample) and item.key in chosen_keys:
                num_samples += 1
                yield item
        if num_samples != len(chosen_keys):
            raise _change_error(part)


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
                if not _is_unchanged(sample, row, digests):
                    raise _change_error(task.source.parts[number])
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


def _is_unchanged(sample: Sample, row: Mapping[str, object], digests: Sequence[str]) -> bool:
    """Whether a sample equals the one in a scan's row, by a checksum of each image and the digest of its messages."""
    checksums = [xxhash.xxh3_64_intdigest(image) for image in sample.images]
    if sample.key != row["key"] or checksums != row["checksums"]:
        return False
    return sample.digest(digests) == row["digest"].hex()


def _change_error(part: Part) -> InputError:
    return InputError(f"{part.path} changed while it was converted; run the same command again")
