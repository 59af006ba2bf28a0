"""The perceptual record of every image in a samples artifact: one table per shard, made by the workers.

Columns: key, place (index of the image in its sample, from 0), offset, size, checksum (the sample's byte range in its
shard), sha256 (32 bytes, of the encoded bytes), and pixels_sha256, width, height, phash, thumbnail
(dataset_builders/pictures/picture_hash.py; null if the image cannot be decoded).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.shard_io import iter_located
from dataset_builders.pictures.picture_hash import THUMBNAIL_SIDE, look_at
from dataset_builders.storage.store import StorePath, local_copy, make_dir
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.row_tables import read_columns, write_rows
from stages.shared.artifacts.workers import StageResources, run_tasks

SCAN_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("place", pa.int32()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("checksum", pa.uint64()),
        ("sha256", pa.binary(32)),
        ("pixels_sha256", pa.binary(32)),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("phash", pa.uint64()),
        ("thumbnail", pa.binary(THUMBNAIL_SIDE**2)),
    ]
)
THUMBNAIL = "thumbnail"
THUMBNAIL_BYTES = THUMBNAIL_SIDE**2
_ALL_BUT_THUMBNAIL = tuple(name for name in SCAN_SCHEMA.names if name != THUMBNAIL)
_UNSEEN = dict.fromkeys(("pixels_sha256", "width", "height", "phash", THUMBNAIL))


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTask:
    """One shard to scan."""

    directory: StorePath  # of the artifact
    shard: ShardEntry
    out: StorePath  # path of the table


def scan_pictures(samples: Artifact, work: StorePath, resources: StageResources) -> list[PictureTask]:
    """Write the missing tables of all shards; progress is in samples. Return a task per shard, in the manifest's
    order."""
    directory = work / "scan"
    make_dir(directory)
    shards = samples.manifest.shards
    tasks = [
        PictureTask(directory=samples.dir, shard=shard, out=directory / f"{i:06d}.parquet")
        for i, shard in enumerate(shards)
    ]
    to_do = [task for task in tasks if not task.out.is_file()]
    total = samples.manifest.num_samples
    finished = total - sum(task.shard.num_samples for task in to_do)
    for _, num_samples in run_tasks(scan_shard, to_do, resources):
        finished += num_samples
        resources.report(finished, total)
    return tasks


def scan_shard(task: PictureTask) -> int:
    """Write a shard's table atomically; return the number of samples read."""
    write_rows(task.out, _rows(task), SCAN_SCHEMA)
    return task.shard.num_samples


def read_pictures(tasks: Sequence[PictureTask]) -> pa.Table:
    """Return the concatenated tables of these tasks, without the thumbnails."""
    none = SCAN_SCHEMA.empty_table().select(_ALL_BUT_THUMBNAIL)
    return pa.concat_tables([none, *(read_columns(task.out, _ALL_BUT_THUMBNAIL) for task in tasks)])


def count_pictures(task: PictureTask) -> int:
    """Return the number of rows of one task's table."""
    with pq.ParquetFile(local_copy(task.out)) as file:
        return file.metadata.num_rows


def read_thumbnails(task: PictureTask) -> np.ndarray:
    """Return the thumbnails of one task's table, (rows, 1024) uint8, in its order; zeros for an undecodable image."""
    column = read_columns(task.out, (THUMBNAIL,))[THUMBNAIL]
    data = b"".join(value.as_py() or bytes(THUMBNAIL_BYTES) for value in column)
    return np.frombuffer(data, np.uint8).reshape(-1, THUMBNAIL_BYTES)


def _rows(task: PictureTask) -> Iterator[dict[str, object]]:
    looks: dict[str, dict[str, object]] = {}  # a shard's images: about a kilobyte each
    for record, fields in iter_located(task.directory / task.shard.name, task.shard):
        for place, image in enumerate(json.loads(fields["json"])["images"]):
            digest = image["sha256"]
            is_first = digest not in looks
            if is_first:
                try:
                    looks[digest] = asdict(look_at(fields[image["name"]]))
                except SkipSample:  # convert.decode_check=header lets damaged images pass; tokenization leaves them out
                    looks[digest] = _UNSEEN
            # A held-out shard has a row per use of an image; a train shard has one per distinct image.
            if is_first or task.shard.split == "heldout":
                yield asdict(record) | {"place": place, "sha256": bytes.fromhex(digest), **looks[digest]}
