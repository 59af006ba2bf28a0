"""Tokenized samples, which the trainer reads: shards and their index.

    train/shard-00000.tar    records: input_ids.i32, loss_mask.u8, image_grid_thw.i32, is_video.u8, pixels by codec
    index/00000.parquet      byte range and sizes of each record; each partition holds the rows of whole shards
    manifest.json            stats["pixels"] is a `PixelStore`: how the pixels are stored and how they were scaled

Arrays are little endian, C order. A video is stored as its temporal groups of two frames, each of which the model
encodes, places and reads like an image. Images and groups are called visuals. The normalised `pixel_values` of the HF
processor depend only on the patches (see `PatchFormat`). `dataset_builders.records.pixel_codecs` decodes a record.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath, local_copy, make_dir

INDEX = "index"  # folder of the index's partitions
GROUP_FRAMES = 2  # frames of a temporal group: a record stores these, and no other temporal_patch_size of a model
PARTITION_ROWS = 1_000_000  # a partition takes whole shards up to about this many rows
INDEX_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("subset", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("checksum", pa.uint64()),  # xxh3_64 of the shard's bytes [offset, offset + size)
        ("num_tokens", pa.int32()),
        ("num_loss_tokens", pa.int32()),  # without the sample's first token, which is not predicted
        ("num_patches", pa.int32()),  # that are encoded: of a temporal group those of one frame
        ("num_images", pa.int32()),  # images and temporal groups of videos
    ]
)
SIZES = ("num_tokens", "num_loss_tokens", "num_patches", "num_images")  # the columns of INDEX_SCHEMA that can be summed


class PatchFormat(StrictModel):
    """The conversion of stored patches to pixel values.

    pixel_values (P, C) float32, C = 3 * temporal_patch_size * patch_size^2, ordered (channel, frame, row, column):
    (byte - 255 * mean) / (255 * std) per channel; of an image the same in each frame. Patches of an image are in HF
    order: blocks of merge_size x merge_size patches, row by row.
    """

    patch_size: int = Field(gt=0, description="side of a patch in pixels")
    temporal_patch_size: int = Field(gt=0, description="frames a patch spans; a still image is repeated")
    merge_size: int = Field(gt=0, description="side of the block of patches that becomes one image token")
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def patch_bytes(self) -> int:
        return 3 * self.patch_size**2


class PixelConfig(StrictModel):
    """The settings of resizing an image and cutting it into patches, from the model's preprocessor_config.json."""

    min_pixels: int = Field(gt=0, description="images with fewer pixels are scaled up to this area")
    max_pixels: int = Field(gt=0, description="images with more pixels are scaled down to this area")
    patch_format: PatchFormat

    @property
    def factor(self) -> int:
        """The number of pixels that both sides of a resized image are multiples of."""
        return self.patch_format.patch_size * self.patch_format.merge_size


Codec = Literal["u8", "u8_zstd", "original"]


class PixelStore(StrictModel):
    """The storage format of pixels in a tokenized artifact's shards: stats["pixels"] of its manifest."""

    format_version: Literal[3] = Field(default=3, description="format of records and index; a reader accepts no other")
    codec: Codec = Field(description="u8: patches; u8_zstd: patches compressed; original: the image files themselves")
    config: PixelConfig = Field(
        description="resizing and patches of the images; for original: applied when they are read"
    )


def read_pixel_store(directory: StorePath, stats: Mapping[str, Any]) -> PixelStore:
    """Return the `PixelStore` of a tokenized artifact, from its manifest's stats."""
    try:
        return PixelStore.model_validate(stats.get("pixels"))
    except ValidationError as error:
        raise InputError(
            f"{directory / 'manifest.json'}: stats.pixels is not of format_version 3, which this code reads; "
            f"delete {directory} and run the tokenize stage again"
        ) from error


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenizedSample:
    """One tokenized sample, neither shifted nor padded."""

    key: str
    input_ids: np.ndarray  # (n,) int32
    loss_mask: np.ndarray  # (n,) uint8, 1 where the token itself is trained on
    # (g, 3) int32 rows (1, h, w) in patches before merging: of each image and of each temporal group of a video, in the
    # order of their tokens
    image_grid_thw: np.ndarray
    is_video: np.ndarray  # (g,) bool, whether the row is of a temporal group
    # (p, 3 * patch_size^2) uint8 in HF patch order: each image, without the temporal copy, and the first frame of each
    # group; p = sum of h*w
    patches: np.ndarray
    later_patches: np.ndarray  # (q, 3 * patch_size^2) uint8: the second frame of each group; q = sum of h*w of groups

    def check(self) -> None:
        """Assert the invariants that every writer guarantees."""
        assert self.input_ids.dtype == np.int32 and self.input_ids.ndim == 1, self.key
        assert self.loss_mask.dtype == np.uint8 and self.loss_mask.shape == self.input_ids.shape, self.key
        assert self.image_grid_thw.dtype == np.int32 and self.image_grid_thw.shape[1:] == (3,), self.key
        assert (self.image_grid_thw[:, 0] == 1).all(), self.key
        assert self.is_video.dtype == bool and self.is_video.shape == self.image_grid_thw.shape[:1], self.key
        assert self.patches.dtype == np.uint8 and self.patches.ndim == 2, self.key
        assert self.later_patches.dtype == np.uint8 and self.later_patches.shape[1:] == self.patches.shape[1:], self.key
        sizes = self.image_grid_thw.prod(-1)
        assert int(sizes.sum()) == len(self.patches), self.key
        assert int(sizes[self.is_video].sum()) == len(self.later_patches), self.key

    def visuals(self) -> "list[Visual]":
        """Return the sample's images and temporal groups, in order."""
        sizes = self.image_grid_thw.prod(-1)
        firsts = np.split(self.patches, sizes.cumsum())[:-1]
        laters = np.split(self.later_patches, np.where(self.is_video, sizes, 0).cumsum())[:-1]
        return [Visual(*visual) for visual in zip(self.image_grid_thw, firsts, laters)]


class Visual(NamedTuple):
    """An image or a temporal group, as the encoder receives it."""

    grid: np.ndarray  # (3,) int32: 1, h, w in patches
    patches: np.ndarray  # (h*w, 3 * patch_size^2) uint8
    later_patches: np.ndarray  # the same of a group's second frame; (0, 3 * patch_size^2) of an image


class IndexWriter:
    """Writer of the index, shard after shard; only one partition's rows are in memory."""

    def __init__(self, directory: StorePath, partition_rows: int = PARTITION_ROWS) -> None:
        self._dir, self._limit = directory / INDEX, partition_rows
        self._tables: list[pa.Table] = []
        self._rows = self._partitions = 0

    def add(self, rows: pa.Table) -> None:
        """Append the rows of one whole shard, in the order of its records."""
        # The end of a partition depends only on the shards' row counts, so a rerun writes the same files.
        if self._tables and self._rows + rows.num_rows > self._limit:
            self._flush()
        self._tables.append(rows.cast(INDEX_SCHEMA))
        self._rows += rows.num_rows

    def close(self) -> None:
        """Write the last partition. An index without rows has one empty partition."""
        if self._tables or not self._partitions:
            self._flush()

    def _flush(self) -> None:
        table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *self._tables]).combine_chunks()
        path = self._dir / f"{self._partitions:05d}.parquet"
        make_dir(path.parent)
        with atomic_path(path) as tmp:
            pq.write_table(table, tmp)
        self._tables, self._rows, self._partitions = [], 0, self._partitions + 1


def index_partitions(directory: StorePath) -> list[StorePath]:
    """Return the paths of the partitions of an artifact's index, in shard order."""
    folder = directory / INDEX
    paths = sorted((p for p in folder.iterdir() if p.suffix == ".parquet"), key=str) if folder.is_dir() else []
    if not paths:
        raise InputError(f"{folder} holds no index; delete {directory} and run the tokenize stage again")
    return paths


def read_partition(path: StorePath) -> pa.Table:
    """Read one partition, with INDEX_SCHEMA: the rows of whole shards, in the order of their records."""
    return pq.read_table(local_copy(path), schema=INDEX_SCHEMA)


def iter_index(directory: StorePath) -> Iterator[pa.Table]:
    """Yield the partitions of the index; only one of them is in memory at a time."""
    for path in index_partitions(directory):
        yield read_partition(path)
