"""Image features, computed once: shards with the output of a frozen vision encoder for each distinct image.

    features/00000.tar               one record per image: `features`, (tokens, width) numbers in C order, little endian
    index/00000.arrow                byte range of each record of the shard, in order, and its rounding error in storage
    images/00000.parquet             the shard's images: digest, and one tokenized sample that has the image
    samples/train/shard-00000.arrow  for each sample of a tokenized shard, the records of its images
    manifest.json                    stats["features"] is a `FeatureStore`

A temporal group of a video counts as an image. An image is identified by its content (`image_digest`), so samples that
share an image share one record. A sample is found by the shard and offset of its tokenized record, which a bin plan
contains. No lookup by key is needed, and a reader opens only the tables that it needs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.manifest import Manifest, load_manifest, read_feature_store
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import Visual
from dataset_builders.errors import damaged
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath, local_copy, make_dir

FIELD = "features"  # the field's name in a record
INDEX_FILES, SAMPLE_FILES, IMAGE_FILES = "index/*.arrow", "samples/*/*.arrow", "images/*.parquet"
_TABLES_OPEN = 1024  # the maximal number of open tables of each kind, per reader

FEATURE_INDEX = pa.schema(
    [
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("checksum", pa.uint64()),  # xxh3_64 of the shard's bytes [offset, offset + size)
        ("tokens", pa.int32()),
        ("largest_error", pa.float64()),  # largest rounding error of a number in its stored type
    ]
)
IMAGE_SCHEMA = pa.schema(
    [
        ("digest", pa.binary(32)),
        ("patches", pa.int32()),
        ("key", pa.string()),  # the sample's key; then its byte range, and the number of the image in the sample
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("checksum", pa.uint64()),
        ("number", pa.int32()),
    ]
)
# One row per sample that has images, by ascending offset in the tokenized shard.
SAMPLE_SCHEMA = pa.schema([("offset", pa.int64()), ("shards", pa.list_(pa.int32())), ("rows", pa.list_(pa.int32()))])


class FeaturePlace(NamedTuple):
    """The address of a record: the number of its shard, and of its row in that shard."""

    shard: int
    row: int


def image_digest(visual: Visual) -> bytes:
    """Return the SHA-256 of an image or a temporal group as the encoder receives it."""
    return hashlib.sha256(b"".join(array.tobytes() for array in visual)).digest()


def shard_name(number: int) -> str:
    """Return the shard's file name, relative to the artifact's directory."""
    return f"features/{number:05d}.tar"


def index_name(number: int) -> str:
    return f"index/{number:05d}.arrow"


def images_name(number: int) -> str:
    return f"images/{number:05d}.parquet"


def samples_name(shard: str) -> str:
    """Return the file name of the table of a tokenized shard's samples."""
    return f"samples/{shard.removesuffix('.tar')}.arrow"


def write_table(path: StorePath, columns: Mapping[str, Sequence[object]], schema: pa.Schema) -> None:
    """Write one table atomically, as an Arrow IPC file that can be mapped into memory."""
    make_dir(path.parent)
    with atomic_path(path) as tmp, pa.ipc.new_file(tmp, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema))


def read_table(path: StorePath, sha256: str | None = None) -> pa.RecordBatch:
    """Return a table that `write_table` wrote, mapped into memory; DamagedFile if it has another SHA-256."""
    return pa.ipc.open_file(pa.memory_map(str(local_copy(path, sha256)))).get_batch(0)


class FeatureShards:
    """The feature records of an artifact, each read on request. Several threads may share it."""

    def __init__(self, directory: StorePath) -> None:
        manifest: Manifest = load_manifest(directory)
        self.store = read_feature_store(directory, manifest.stats)
        self._dir, self._sha256 = directory, {file.name: file.sha256 for file in manifest.files}
        self._samples = lru_cache(_TABLES_OPEN)(lambda shard: self._open(samples_name(shard)))
        self._index = lru_cache(_TABLES_OPEN)(self._open_index)

    def places(self, shard: str, offset: int, num_images: int) -> list[FeaturePlace]:
        """Return the addresses of the records of a sample's images, in order. `shard` and `offset` are the place of the
        sample's record in the tokenized artifact."""
        if num_images == 0:
            return []
        table = self._samples(shard)
        offsets = table["offset"].to_numpy()
        row = int(offsets.searchsorted(offset))
        is_there = row < len(offsets) and offsets[row] == offset
        lists = [table[name][row].as_py() for name in ("shards", "rows")] if is_there else [[], []]
        if len(lists[0]) != num_images:
            raise damaged(
                self._dir / samples_name(shard), f"knows {len(lists[0])} of {num_images} images at byte {offset}"
            )
        return [*map(FeaturePlace, *lists)]

    def read(self, place: FeaturePlace) -> memoryview:
        """Return the bytes of one image's features, (tokens, width) numbers; DamagedFile if they have changed."""
        index, path = self._index(place.shard), self._dir / shard_name(place.shard)
        if place.row >= len(index["offset"]):
            raise damaged(path, f"has no image {place.row}")
        offset, size, checksum, tokens = (int(index[name][place.row]) for name in FEATURE_INDEX.names[:4])
        data = read_record(path, offset, size, (), checksum, f"image {place.row}").get(FIELD, memoryview(b""))
        if len(data) != tokens * self.store.token_bytes:
            raise damaged(path, f"holds {len(data)} bytes of image {place.row}, which has {tokens} tokens")
        return data

    def _open_index(self, number: int) -> dict[str, np.ndarray]:
        table = self._open(index_name(number))
        return {name: table[name].to_numpy() for name in FEATURE_INDEX.names}

    def _open(self, name: str) -> pa.RecordBatch:
        if name not in self._sha256:
            raise damaged(self._dir / name, "is not in the manifest")
        return read_table(self._dir / name, self._sha256[name])
