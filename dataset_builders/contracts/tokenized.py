"""Tokenized samples: what the trainer reads, in shards with an index beside them.

Members of one record: `input_ids.i32`, `loss_mask.u8`, `image_grid_thw.i32`, `patches.u8`; little endian, C order.
The normalised `pixel_values` of the HF processor are a function of the patches alone (see `PatchFormat`).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.strict import StrictModel

INDEX = "index.parquet"
INDEX_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("subset", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("num_tokens", pa.int32()),
        ("num_loss_tokens", pa.int32()),
        ("num_patches", pa.int32()),
        ("num_images", pa.int32()),
    ]
)


PATCHES = "patches.u8"  # the field of a record that is nearly all of its bytes


class PatchFormat(StrictModel):
    """How stored patches become pixel values: stats["patch_format"] of a tokenized artifact's manifest.

    pixel_values (P, C) float32, C = 3 * temporal_patch_size * patch_size^2, ordered (channel, frame, row, column):
    (byte - 255 * mean) / (255 * std) for each channel, each frame a copy. Patches of an image are in HF order: by
    blocks of merge_size x merge_size, row by row.
    """

    patch_size: int = Field(gt=0, description="side of a patch in pixels")
    temporal_patch_size: int = Field(gt=0, description="frames a patch spans; a still image is repeated")
    merge_size: int = Field(gt=0, description="side of the block of patches that becomes one image token")
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def patch_bytes(self) -> int:
        """Bytes of a stored patch: 3 * patch_size^2."""
        return 3 * self.patch_size**2


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenizedSample:
    """One sample, nothing shifted, nothing padded.

    Attributes:
        key: the sample's key.
        input_ids: (n,) int32.
        loss_mask: (n,) uint8, 1 where the token itself is to be learnt.
        image_grid_thw: (g, 3) int32, patches before merging; t = 1 for a still image.
        patches: (p, 3 * patch_size^2) uint8 in HF patch order, without the temporal copy; p = sum of t*h*w.
    """

    key: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    image_grid_thw: np.ndarray
    patches: np.ndarray

    def check(self) -> None:
        """Assert what every writer must have made true."""
        assert self.input_ids.dtype == np.int32 and self.input_ids.ndim == 1, self.key
        assert self.loss_mask.dtype == np.uint8 and self.loss_mask.shape == self.input_ids.shape, self.key
        assert self.image_grid_thw.dtype == np.int32 and self.image_grid_thw.shape[1:] == (3,), self.key
        assert self.patches.dtype == np.uint8 and self.patches.ndim == 2, self.key
        assert int(self.image_grid_thw.prod(-1).sum()) == len(self.patches), self.key

    def to_fields(self) -> dict[str, bytes]:
        return {
            "image_grid_thw.i32": self.image_grid_thw.tobytes(),
            "input_ids.i32": self.input_ids.tobytes(),
            "loss_mask.u8": self.loss_mask.tobytes(),
            PATCHES: self.patches.tobytes(),
        }


def from_fields(key: str, fields: dict[str, bytes], patch_format: PatchFormat) -> TokenizedSample:
    """The inverse of `TokenizedSample.to_fields`; a record read without its patches gives a sample with none."""
    return TokenizedSample(
        key=key,
        input_ids=np.frombuffer(fields["input_ids.i32"], np.int32),
        loss_mask=np.frombuffer(fields["loss_mask.u8"], np.uint8),
        image_grid_thw=np.frombuffer(fields["image_grid_thw.i32"], np.int32).reshape(-1, 3),
        patches=np.frombuffer(fields.get(PATCHES, b""), np.uint8).reshape(-1, patch_format.patch_bytes),
    )


def write_index(directory: Path, rows: pa.Table | list[dict[str, object]]) -> None:
    """Write index.parquet; one row a sample, in shard order."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
    with atomic_path(directory / INDEX) as tmp:
        pq.write_table(table.cast(INDEX_SCHEMA), tmp)


def read_index(directory: Path) -> pa.Table:
    """index.parquet as a table with INDEX_SCHEMA."""
    return pq.read_table(directory / INDEX, schema=INDEX_SCHEMA)
