"""Pass 2 of convert: the planned samples copied from the source into shards."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import Sample, Split
from dataset_builders.contracts.sample_record import to_fields
from dataset_builders.contracts.shard_io import ShardWriter, finished_shard
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.parts import Part
from dataset_builders.registry import get_builder
from stages.convert_plan import Plan
from stages.convert_scan import Scan, read_scan, scan_path
from stages.workers import StageResources, run_tasks

_SEEN_COLUMNS = ("key", "digest", "pictures.list.element.sha256", "checksums")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRows:
    """A source as convert sees it.

    Attributes:
        builder: name of the builder.
        options: the builder's settings.
        parts: number of a part -> the part.
    """

    builder: str
    options: StrictModel
    parts: Mapping[int, Part]

    def read(self, number: int, keys: Sequence[str]) -> Iterator[Sample]:
        """The samples of these keys of a part, in the order of the source.

        Raises:
            InputError: the part no longer holds what it held when it was scanned.
        """
        part, wanted = self.parts[number], set(keys)
        found = 0
        for item in get_builder(self.builder).iter_part(part, self.options, {part.row(key) for key in keys}):
            if isinstance(item, Sample) and item.key in wanted:
                found += 1
                yield item
        if found != len(wanted):
            raise _changed(part)

    def only(self, numbers: Collection[int]) -> "RawRows":
        """The same source with these parts alone."""
        parts = {number: self.parts[number] for number in numbers}
        return RawRows(builder=self.builder, options=self.options, parts=parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteTask:
    """One shard to write below `work`.

    Attributes:
        name: path below `work`, train/shard-00000.tar.
        rows: part number -> (m,) int64 numbers of rows of that part's scan, ascending.
        source: the parts in `rows`.
    """

    work: StorePath
    name: str
    split: Split
    rows: Mapping[int, np.ndarray]
    source: RawRows


def write_tasks(work: StorePath, scan: Scan, plan: Plan, source: RawRows) -> Iterator[WriteTask]:
    """A task for every planned shard, made one by one."""
    for shard in plan.shards:
        parts = scan.part_of(shard.rows)
        numbers, begins = np.unique(parts, return_index=True)
        pieces = np.split(shard.rows, begins[1:])
        rows = {int(number): piece - scan.starts[number] for number, piece in zip(numbers, pieces)}
        yield WriteTask(work=work, name=shard.name, split=shard.split, rows=rows, source=source.only(rows))


def write_shard(task: WriteTask) -> ShardEntry:
    """Copy a shard's samples from the source, or find it finished.

    Raises:
        InputError: a sample is not what it was when it was scanned.
    """
    done = finished_shard(task.work, task.name)
    if done is not None:
        return done
    with ShardWriter(task.work, task.name) as writer:
        for number, places in task.rows.items():
            scanned = read_scan(scan_path(task.work, number), _SEEN_COLUMNS)
            scanned = scanned.take(pa.array(places))
            samples = task.source.read(number, scanned["key"].to_pylist())
            for sample, seen in zip(samples, scanned.to_pylist(), strict=True):
                digests = [picture["sha256"].hex() for picture in seen["pictures"]]
                if not _is_the_same(sample, seen, digests):
                    raise _changed(task.source.parts[number])
                writer.write(sample.key, to_fields(sample, digests))
        return writer.commit(task.split)


def write_all(
    tasks: Iterable[WriteTask], num_samples: int, num_rows: int, resources: StageResources
) -> list[ShardEntry]:
    """Every shard, in the order of the tasks. Progress goes from num_rows to twice that."""
    entries: dict[int, ShardEntry] = {}
    written = 0
    for i, entry in run_tasks(write_shard, tasks, resources):
        entries[i] = entry
        written += entry.num_samples
        resources.report(num_rows + num_rows * written // num_samples, 2 * num_rows)
    return [entries[i] for i in range(len(entries))]


def _is_the_same(sample: Sample, seen: Mapping[str, object], digests: Sequence[str]) -> bool:
    """Whether a sample is the one that was scanned, by a checksum of each image and the digest of its messages."""
    checksums = [xxhash.xxh3_64_intdigest(image) for image in sample.images]
    if sample.key != seen["key"] or checksums != seen["checksums"]:
        return False
    return sample.digest(digests) == seen["digest"].hex()


def _changed(part: Part) -> InputError:
    return InputError(f"{part.path} changed while it was converted; run the same command again")
