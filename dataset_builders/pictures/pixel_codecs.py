"""Records of tokenized shards: encode a tokenized sample, with the pixels in the artifact's codec, and decode it.

    u8          `patches.u8`: the patches of `pixels.py`, 3 * patch_size^2 bytes each, used as they are read
    u8_zstd     `patches.u8.zst`: the same, compressed; for documents and drawings, as photos gain little
    original    `0.jpg`, `1.png`, ...: the original image files; `pixels.py` converts them whenever a record is read

A reader gets the same patch bytes with each codec.
"""

from collections.abc import Container, Mapping

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.tokenized import Codec, PixelConfig, PixelStore, TokenizedSample
from dataset_builders.pictures.pixels import encode_image

_PATCHES, _COMPRESSED = "patches.u8", "patches.u8.zst"
_ZSTD = pa.Codec("zstd", compression_level=3)


class _ImageNames:
    """The names of a record's image files: all names that begin with a digit."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name[:1].isdigit()


# The fields of a record that hold its pixels: a reader without a vision encoder may skip them.
PIXEL_FIELDS: dict[Codec, Container[str]] = {
    "u8": (_PATCHES,),
    "u8_zstd": (_COMPRESSED,),
    "original": _ImageNames(),
}


def encode_sample(sample: TokenizedSample, codec: Codec, images: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the fields of one record.

    With codec original the sample's patches are not used and may be empty. Only then `images` is used: the sample's
    image files by their names in the sample shard, `0.jpg`.
    """
    fields = {
        "image_grid_thw.i32": sample.image_grid_thw.tobytes(),
        "input_ids.i32": sample.input_ids.tobytes(),
        "loss_mask.u8": sample.loss_mask.tobytes(),
    }
    if codec == "u8":
        return {**fields, _PATCHES: sample.patches.tobytes()}
    if codec == "u8_zstd":
        return {**fields, _COMPRESSED: _ZSTD.compress(sample.patches.tobytes(), asbytes=True)}
    return {**fields, **images}


def decode_sample(key: str, fields: Mapping[str, bytes | memoryview], pixels: PixelStore) -> TokenizedSample:
    """Return the sample of a record. Inverse of `encode_sample`; without pixel fields, the sample has no patches.

    Raises ValueError, which names the key, for a field or an image that is missing, cut short or cannot be decoded.
    """
    try:
        grids = np.frombuffer(fields["image_grid_thw.i32"], np.int32).reshape(-1, 3)
        return TokenizedSample(
            key=key,
            input_ids=np.frombuffer(fields["input_ids.i32"], np.int32),
            loss_mask=np.frombuffer(fields["loss_mask.u8"], np.uint8),
            image_grid_thw=grids,
            patches=_decode_patches(fields, grids, pixels),
        )
    except (KeyError, ValueError, OSError, SkipSample) as error:
        raise ValueError(f"{key}: the stored record cannot be decoded ({type(error).__name__}: {error})") from error


def _decode_patches(fields: Mapping[str, bytes | memoryview], grids: np.ndarray, pixels: PixelStore) -> np.ndarray:
    """Return (P, 3 * patch_size^2) uint8."""
    if pixels.codec == "original":
        return _encode_images(fields, grids, pixels.config)
    width = pixels.config.patch_format.patch_bytes
    size = int(grids.prod(-1).sum()) * width
    if pixels.codec == "u8":
        data = fields.get(_PATCHES)
    else:
        data = _ZSTD.decompress(fields[_COMPRESSED], size, asbytes=True) if _COMPRESSED in fields else None
    if data is not None and len(data) != size:
        raise ValueError(f"{len(data)} bytes of patches, where its grids need {size}")
    return np.frombuffer(data or b"", np.uint8).reshape(-1, width)


def _encode_images(fields: Mapping[str, bytes | memoryview], grids: np.ndarray, config: PixelConfig) -> np.ndarray:
    names = sorted((name for name in fields if name in PIXEL_FIELDS["original"]), key=_number)
    no_patches = np.zeros((0, config.patch_format.patch_bytes), np.uint8)
    if not names:
        return no_patches
    encoded = [encode_image(bytes(fields[name]), config) for name in names]
    image_grids = [grid.tolist() for _, grid in encoded]
    if image_grids != grids.tolist():
        raise ValueError(f"its images have grids {image_grids}, but {grids.tolist()} are stored")
    patches = [patches for patches, _ in encoded]
    return patches[0] if len(patches) == 1 else np.concatenate(patches)


def _number(name: str) -> int:
    return int(name.partition(".")[0])
