"""The images of every tokenized shard by their content: one table per shard, made by the workers."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dataset_builders.contracts.features import IMAGE_SCHEMA, image_digest
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.shard_io import iter_located
from dataset_builders.contracts.tokenized import PixelStore, read_pixel_store
from dataset_builders.pictures.pixels import decode_sample
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
    write_rows(task.out, _rows(task), IMAGE_SCHEMA)
    return task.shard.num_samples


def _rows(task: ScanTask) -> Iterator[dict[str, object]]:
    for record, fields in iter_located(task.directory / task.shard.name, task.shard):
        sample = decode_sample(record.key, fields, task.pixels)
        sizes = sample.image_grid_thw.prod(1)
        for number, patches in enumerate(np.split(sample.patches, sizes.cumsum())[:-1]):
            yield {
                "digest": image_digest(sample.image_grid_thw[number], patches),
                "patches": len(patches),
                "key": record.key,
                "shard": task.shard.name,
                "offset": record.offset,
                "size": record.size,
                "checksum": record.checksum,
                "number": number,
            }
