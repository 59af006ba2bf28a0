"""Pass 2 of convert: the planned samples copied from the source into shards."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import Sample
from dataset_builders.contracts.sample_record import to_fields
from dataset_builders.contracts.shard_io import ShardWriter, finished_shard
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.parts import Part
from dataset_builders.registry import get_builder
from stages.convert_plan import PlannedShard
from stages.workers import StageResources, run_tasks


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
            raise InputError(f"{part.path} changed while it was converted; run the same command again")

    def only(self, numbers: Collection[int]) -> "RawRows":
        """The same source with these parts alone."""
        parts = {number: self.parts[number] for number in numbers}
        return RawRows(builder=self.builder, options=self.options, parts=parts)


@dataclass(frozen=True, slots=True)
class WriteTask:
    """One shard to write below `work`, from these rows."""

    work: Path
    shard: PlannedShard
    rows: RawRows


def write_shard(task: WriteTask) -> ShardEntry:
    """Copy a shard's samples from the source, or find it finished."""
    done = finished_shard(task.work, task.shard.name)
    if done is not None:
        return done
    with ShardWriter(task.work, task.shard.name) as writer:
        for number, keys in task.shard.keys.items():
            for sample in task.rows.read(number, keys):
                writer.write(sample.key, to_fields(sample))
        return writer.commit(task.shard.split)


def write_all(tasks: Sequence[WriteTask], num_rows: int, resources: StageResources) -> list[ShardEntry]:
    """Every shard, in the order of the tasks. Progress goes from num_rows to twice that."""
    entries: dict[int, ShardEntry] = {}
    total = sum(task.shard.num_samples for task in tasks)
    written = 0
    for i, entry in run_tasks(write_shard, tasks, resources.num_workers):
        entries[i] = entry
        written += entry.num_samples
        resources.report(num_rows + num_rows * written // total, 2 * num_rows)
    return [entries[i] for i in range(len(tasks))]
