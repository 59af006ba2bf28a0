"""The records of tokenized shards: encoded and decoded, with the pixels in the artifact's codec.

A reader gets the same patch bytes with each codec:

    u8          `patches.u8`: the patches, 3 * patch_size^2 bytes each, used as they are read; `later_patches.u8` in a
                record with videos: those of the second frames
    u8_zstd     `patches.u8.zst`, `later_patches.u8.zst`: the same, compressed; for documents and drawings, as photos
                gain little
    original    `0.jpg`, `1.png`, `video0.mp4`, ...: the original files, which are converted whenever a record is read;
                `videos.json`: of each video its files, start, end and timestamps, and the indices of its frames
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.sample import SkipSample, video_of
from dataset_builders.contracts.tokenized import Codec, PixelStore, TokenizedSample, Visual
from dataset_builders.pictures.pixels import encode_frames, encode_image
from dataset_builders.videos.decode import iter_frames

_PATCHES, _LATER, _COMPRESSED = "patches.u8", "later_patches.u8", ".zst"
_VIDEOS = "videos.json"
_ZSTD = pa.Codec("zstd", compression_level=3)


class _FileNames:
    """The names of a record's original files: of images, which begin with a digit, and of videos."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name[:1].isdigit() or name.startswith("video"))


# The fields of a record that hold its pixels: a reader without a vision encoder may skip them.
PIXEL_FIELDS: dict[Codec, Container[str]] = {
    "u8": (_PATCHES, _LATER),
    "u8_zstd": (_PATCHES + _COMPRESSED, _LATER + _COMPRESSED),
    "original": _FileNames(),
}


def encode_sample(
    sample: TokenizedSample,
    codec: Codec,
    files: Mapping[str, bytes],
    videos: Sequence[Mapping[str, object]] = (),
) -> dict[str, bytes]:
    """Return the fields of one record.

    With codec original the sample's patches are not used and may be empty. Only then these are used:

    Args:
        files: the sample's image and video files by their names in the sample shard, `0.jpg`.
        videos: the sample shard's record of each video, with the `indices` of the frames that are read.
    """
    fields = {
        "image_grid_thw.i32": sample.image_grid_thw.tobytes(),
        "input_ids.i32": sample.input_ids.tobytes(),
        "is_video.u8": sample.is_video.tobytes(),
        "loss_mask.u8": sample.loss_mask.tobytes(),
    }
    if codec == "original":
        return {**fields, **files} | ({_VIDEOS: json.dumps(list(videos)).encode()} if videos else {})
    patches = {_PATCHES: sample.patches.tobytes()}
    if sample.is_video.any():
        patches[_LATER] = sample.later_patches.tobytes()
    if codec == "u8":
        return {**fields, **patches}
    return {**fields, **{name + _COMPRESSED: _ZSTD.compress(data, asbytes=True) for name, data in patches.items()}}


def decode_sample(key: str, fields: Mapping[str, bytes | memoryview], pixels: PixelStore) -> TokenizedSample:
    """Return the sample of a record. Inverse of `encode_sample`; without pixel fields, the sample has no patches.

    Raises ValueError, which names the key, for a field or an image that is missing, cut short or cannot be decoded.
    """
    try:
        grids = np.frombuffer(fields["image_grid_thw.i32"], np.int32).reshape(-1, 3)
        is_video = np.frombuffer(fields["is_video.u8"], np.uint8).astype(bool)
        if len(is_video) != len(grids):
            raise ValueError(f"{len(is_video)} marks of videos for {len(grids)} grids")
        patches, later_patches = _decode_patches(fields, grids, is_video, pixels)
        return TokenizedSample(
            key=key,
            input_ids=np.frombuffer(fields["input_ids.i32"], np.int32),
            loss_mask=np.frombuffer(fields["loss_mask.u8"], np.uint8),
            image_grid_thw=grids,
            is_video=is_video,
            patches=patches,
            later_patches=later_patches,
        )
    except (KeyError, ValueError, OSError, SkipSample) as error:
        raise ValueError(f"{key}: the stored record cannot be decoded ({type(error).__name__}: {error})") from error


def _decode_patches(
    fields: Mapping[str, bytes | memoryview], grids: np.ndarray, is_video: np.ndarray, pixels: PixelStore
) -> tuple[np.ndarray, np.ndarray]:
    """Return (p, 3 * patch_size^2) uint8 and (q, 3 * patch_size^2) uint8, the patches of first and of second frames."""
    width = pixels.config.patch_format.patch_bytes
    if pixels.codec == "original":
        if not any(name in _FileNames() for name in fields):
            grids = grids[:0]
        visuals = [*_original_visuals(fields, grids, is_video, pixels)]
        none = np.zeros((0, width), np.uint8)
        patches = [visual.patches for visual in visuals] or [none]
        later = [none, *(visual.later_patches for visual in visuals)]
        # A single image is not copied.
        return patches[0] if len(patches) == 1 else np.concatenate(patches), np.concatenate(later)
    sizes = grids.prod(-1)
    has_pixels = any(name in fields for name in PIXEL_FIELDS[pixels.codec])
    decoded = []
    for name, rows in ((_PATCHES, int(sizes.sum())), (_LATER, int(sizes[is_video].sum()))):
        if pixels.codec == "u8":
            data = fields.get(name, b"")
        else:
            compressed = fields.get(name + _COMPRESSED)
            data = b"" if compressed is None else _ZSTD.decompress(compressed, rows * width, asbytes=True)
        if has_pixels and len(data) != rows * width:
            raise ValueError(f"{len(data)} bytes of {name}, where its grids need {rows * width}")
        decoded.append(np.frombuffer(data, np.uint8).reshape(-1, width))
    return decoded[0], decoded[1]


def _original_visuals(
    fields: Mapping[str, bytes | memoryview], grids: np.ndarray, is_video: np.ndarray, pixels: PixelStore
) -> Iterator[Visual]:
    """Yield the images and temporal groups of a record of original files, converted now."""
    patch_format = pixels.config.patch_format
    none, size = np.zeros((0, patch_format.patch_bytes), np.uint8), patch_format.patch_size
    names = sorted((name for name in fields if name[:1].isdigit()), key=lambda name: int(name.partition(".")[0]))
    images = iter(names)
    videos = iter(json.loads(bytes(fields[_VIDEOS])) if _VIDEOS in fields else [])
    place = 0
    while place < len(grids):
        if not is_video[place]:
            if (name := next(images, None)) is None:
                raise ValueError(f"its images are {len(names)}, but {grids.tolist()} are stored")
            patches, grid = encode_image(bytes(fields[name]), pixels.config)
            if grid.tolist() != grids[place].tolist():
                raise ValueError(f"{name} has the grid {grid.tolist()}, but {grids[place].tolist()} is stored")
            yield Visual(grid, patches, none)
            place += 1
            continue
        if (record := next(videos, None)) is None:
            raise ValueError(f"{_VIDEOS} has fewer videos than its grids")
        height, width = (int(side) * size for side in grids[place, 1:])
        frames = iter_frames(video_of(record, fields), record["indices"])
        for group in encode_frames(frames, height, width, patch_format):
            yield Visual(grids[place], *group)
            place += 1
    if next(images, None) is not None or next(videos, None) is not None:
        raise ValueError(f"more images or videos than the grids {grids.tolist()}")
