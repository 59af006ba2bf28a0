"""The distinct images of tokenized shards, and their assignment to feature shards in the order of the samples.

scan/000000.parquet              the images of a tokenized shard by their content, made by the workers
images/00000.parquet             the images of a feature shard, which the trainer reads
samples/train/shard-00000.arrow  the records of the images of each sample of a tokenized shard
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from dataset_builders.contracts.features import (
    IMAGE_SCHEMA,
    SAMPLE_SCHEMA,
    FeaturePlace,
    image_digest,
    images_name,
    samples_name,
    write_table,
)
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.shard_io import iter_located
from dataset_builders.contracts.tokenized import PixelStore, read_pixel_store
from dataset_builders.records.pixel_codecs import decode_sample
from dataset_builders.storage.store import StorePath, make_dir
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.row_tables import write_rows
from stages.shared.artifacts.workers import StageResources, run_tasks

_BYTES_PER_WORKER = 1e9  # bytes that are read and hashed in about the time that a process takes to start


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """One shard to scan."""

    directory: StorePath  # of the artifact
    shard: ShardEntry
    pixels: PixelStore
    out: StorePath  # path of the table, with IMAGE_SCHEMA: a row for each use of an image, in the samples' order


def scan_images(tokenized: Artifact, directory: StorePath, resources: StageResources) -> list[ScanTask]:
    """Write the missing tables of all shards to `directory`; progress is in samples. Return a task per shard, in the
    manifest's order."""
    make_dir(directory)
    shards, pixels = tokenized.manifest.shards, read_pixel_store(tokenized.dir, tokenized.manifest.stats)
    tasks = [
        ScanTask(directory=tokenized.dir, shard=shard, pixels=pixels, out=directory / f"{number:06d}.parquet")
        for number, shard in enumerate(shards)
    ]
    to_do = [task for task in tasks if not task.out.is_file()]
    total = tokenized.manifest.num_samples
    finished = total - sum(task.shard.num_samples for task in to_do)
    num_workers = max(1, int(sum(shard.size_bytes for shard in shards) / _BYTES_PER_WORKER))
    for _, num_samples in run_tasks(scan_shard, to_do, resources.at_most(num_workers)):
        finished += num_samples
        resources.report(finished, total)
    return tasks


def scan_shard(task: ScanTask) -> int:
    """Write a shard's table atomically; return the number of samples read."""

    def rows() -> Iterator[dict[str, object]]:
        for record, fields in iter_located(task.directory / task.shard.name, task.shard):
            sample = decode_sample(record.key, fields, task.pixels)
            for number, visual in enumerate(sample.visuals()):
                yield {
                    "digest": image_digest(visual),
                    "patches": len(visual.patches),
                    "key": record.key,
                    "shard": task.shard.name,
                    "offset": record.offset,
                    "size": record.size,
                    "checksum": record.checksum,
                    "number": number,
                }

    write_rows(task.out, rows(), IMAGE_SCHEMA)
    return task.shard.num_samples


@dataclass(slots=True)
class ImagePlan:
    """The distinct images seen so far, and the current shard. Takes about 250 bytes per distinct image."""

    directory: StorePath
    limit: int  # patches in a shard, at most; a larger image has a shard of its own
    places: dict[bytes, FeaturePlace] = field(default_factory=dict)
    num_shards: int = 0
    uses: int = 0  # number of images seen, including repetitions
    _rows: list[dict] = field(default_factory=list)
    _patches: int = 0
    _split: Split | None = None

    def add(self, image: dict, split: Split) -> FeaturePlace:
        """Return the record address of an image; a new image gets the next one."""
        self.uses += 1
        known = self.places.get(image["digest"])
        if known is not None:
            return known
        if self._rows and (self._patches + image["patches"] > self.limit or split != self._split):
            self.flush()
        place = FeaturePlace(self.num_shards, len(self._rows))
        self.places[image["digest"]] = place
        self._rows.append(image)
        self._patches, self._split = self._patches + image["patches"], split
        return place

    def flush(self) -> None:
        """Write the table of the current shard, if it has an image."""
        if self._rows:
            path = self.directory / images_name(self.num_shards)
            make_dir(path.parent)
            write_rows(path, self._rows, IMAGE_SCHEMA)
            self._rows, self._patches, self.num_shards = [], 0, self.num_shards + 1


def plan_images(tasks: Sequence[ScanTask], directory: StorePath, limit: int) -> ImagePlan:
    """Write the tables of all feature shards, of at most `limit` patches, and of all tokenized shards. Each task is a
    tokenized shard whose table of images exists."""
    plan = ImagePlan(directory, limit)
    for task in tasks:
        columns: dict[str, list] = {name: [] for name in SAMPLE_SCHEMA.names}
        for image in pq.read_table(task.out).to_pylist():
            place = plan.add(image, task.shard.split)
            if image["number"] == 0:  # the first image of the next sample
                for column, value in zip(columns.values(), (image["offset"], [], [])):
                    column.append(value)
            columns["shards"][-1].append(place.shard)
            columns["rows"][-1].append(place.row)
        write_table(directory / samples_name(task.shard.name), columns, SAMPLE_SCHEMA)
    plan.flush()
    return plan
