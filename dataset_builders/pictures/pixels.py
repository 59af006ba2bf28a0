"""The only conversion of encoded images and of frames to uint8 patches, the same for training and evaluation.

decode, EXIF, alpha on white, RGB (`images.py`) -> smart_resize -> uint8 antialiased bicubic -> patches in HF order.
Normalisation and the temporal copy act on single bytes, so they happen later: in `pixel_values` here, on the device in
training. The result equals the result of transformers' torchvision image processor bit for bit.

The records of tokenized shards hold the pixels in the artifact's codec. A reader gets the same patch bytes with each:

    u8          `patches.u8`: the patches, 3 * patch_size^2 bytes each, used as they are read; `later_patches.u8` in a
                record with videos: those of the second frames
    u8_zstd     `patches.u8.zst`, `later_patches.u8.zst`: the same, compressed; for documents and drawings, as photos
                gain little
    original    `0.jpg`, `1.png`, `video0.mp4`, ...: the original files, which are converted whenever a record is read;
                `videos.json`: of each video its files, start, end and timestamps, and the indices of its frames
"""

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch

from dataset_builders.contracts.sample import SkipSample, video_of
from dataset_builders.contracts.tokenized import Codec, PatchFormat, PixelConfig, PixelStore, TokenizedSample, Visual
from dataset_builders.pictures.images import MAX_ASPECT, image_size, read_rgb
from dataset_builders.videos.decode import iter_frames

_BLOCK = 1024  # number of patches that are normalised at a time
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


def smart_resize(height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Return the (height, width) to resize to: multiples of `config.factor`, area within the limits, aspect nearly
    kept. Raises SkipSample above 200 to 1."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise SkipSample("aspect", f"{width} x {height} pixels, over {MAX_ASPECT} to 1")
    factor = config.factor
    # Python's round takes a half to the even multiple, and so does transformers.
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    # transformers scales from the given sides, not from the rounded ones; floor and ceil keep the area in its limits.
    if new_height * new_width > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        new_height, new_width = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif new_height * new_width < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        new_height, new_width = (math.ceil(s * grow / factor) * factor for s in (height, width))
    return new_height, new_width


def count_patches(data: bytes, config: PixelConfig) -> int:
    """Return the number of patches that `encode_image` will give, from the image's header. Raises SkipSample."""
    # EXIF may swap the sides, which does not matter: smart_resize treats both alike.
    return int(image_grid(*image_size(data), config).prod())


def image_grid(height: int, width: int, config: PixelConfig) -> np.ndarray:
    """Return the (3,) int32 grid (1, h, w) in patches for an image size in pixels. Raises as `smart_resize`."""
    size = config.patch_format.patch_size
    return np.array([1, *(side // size for side in smart_resize(height, width, config))], np.int32)


def encode_image(data: bytes, config: PixelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the patches of an image in any format that Pillow reads, and its grid. Raises SkipSample with the reason.

    Returns:
        patches: (h*w, 3 * patch_size^2) uint8 in HF patch order, without the temporal copy.
        grid: (3,) int32: 1, h, w in patches.
    """
    return encode_rgb(read_rgb(data), config)


def encode_rgb(pixels: np.ndarray, config: PixelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the patches and the grid of a decoded image, (height, width, 3) uint8. See `encode_image`."""
    return _patchify(_resize(pixels, config), config.patch_format)


def encode_frames(
    frames: Iterable[np.ndarray], height: int, width: int, patch_format: PatchFormat
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the patches of the first and of the second frame of each temporal group, each (h*w, 3 * patch_size^2) uint8
    in HF patch order. A frame without a second one is its own. `frames` are (any height, any width, 3) uint8, and are
    resized to (height, width), multiples of a merged patch."""
    waiting = None
    for frame in frames:
        patches, _ = _patchify(_scaled(frame, height, width), patch_format)
        if waiting is None:
            waiting = patches
        else:
            yield waiting, patches
            waiting = None
    if waiting is not None:
        yield waiting, waiting


def resized(pixels: np.ndarray, config: PixelConfig) -> np.ndarray:
    """Return a decoded image, (height, width, 3) uint8, at the size that `encode_rgb` cuts, for other programs."""
    return _resize(pixels, config).permute(1, 2, 0).contiguous().numpy()


def _resize(pixels: np.ndarray, config: PixelConfig) -> torch.Tensor:
    """Return (3, new height, new width) uint8 of (height, width, 3) uint8."""
    return _scaled(pixels, *smart_resize(pixels.shape[0], pixels.shape[1], config))


def _scaled(pixels: np.ndarray, height: int, width: int) -> torch.Tensor:
    # No copy to planes: torch resizes interleaved pixels faster, to the same bits.
    planes = torch.from_numpy(_writable(pixels)).permute(2, 0, 1)[None]
    if planes.shape[-2:] != (height, width):
        # On uint8, not on floats: the rounding between the two passes is part of the reference result.
        planes = torch.nn.functional.interpolate(
            planes, size=(height, width), mode="bicubic", antialias=True, align_corners=False
        )
    return planes[0]


def pixel_values(patches: np.ndarray, patch_format: PatchFormat, out: np.ndarray | None = None) -> np.ndarray:
    """Return the HF processor's pixel_values, (P, C) float32 with C = 3 * temporal_patch_size * patch_size^2.

    Args:
        patches: (P, 3 * patch_size^2) uint8.
        out: (at least P, C) float32, contiguous, filled and returned; new memory costs more than the arithmetic.
    """
    size, frames = patch_format.patch_size**2, patch_format.temporal_patch_size
    values = (np.empty((len(patches), 3 * frames * size), np.float32) if out is None else out)[: len(patches)]
    # The products are in float32, as in the reference: float64 would round differently for means other than 0.5.
    mean, std = (
        torch.tensor(channels, dtype=torch.float32).mul_(255).repeat_interleave(size)
        for channels in (patch_format.image_mean, patch_format.image_std)
    )
    # Blocks keep the numbers in the cache. One channel of one frame is one element of the last copy.
    work = torch.empty((min(len(patches), _BLOCK), 3 * size))
    frame = f"V{4 * size}"
    for start in range(0, len(patches), _BLOCK):
        block = _writable(patches[start : start + _BLOCK])
        scaled = work[: len(block)].copy_(torch.from_numpy(block)).sub_(mean).div_(std).numpy()
        target = values[start : start + _BLOCK].view(frame).reshape(len(block), 3, frames)
        target[:] = scaled.view(frame)[..., None]
    return values


def _patchify(pixels: torch.Tensor, patch_format: PatchFormat) -> tuple[np.ndarray, np.ndarray]:
    """Cut (3, height, width) uint8 into patches by blocks of merge_size^2; return patches and grid."""
    planes = pixels.contiguous().numpy()
    size, merge = patch_format.patch_size, patch_format.merge_size
    rows, columns = planes.shape[1] // size, planes.shape[2] // size
    # One row of a patch is one element of the copy: with single bytes the copy takes twice as long.
    lines = planes.view(f"V{size}")
    lines = lines.reshape(3, rows // merge, merge, size, columns // merge, merge).transpose(1, 4, 2, 5, 0, 3)
    patches = np.ascontiguousarray(lines).view(np.uint8).reshape(rows * columns, patch_format.patch_bytes)
    return patches, np.array([1, rows, columns], np.int32)


def _writable(pixels: np.ndarray) -> np.ndarray:
    """Return the same memory if it is writable, else a copy: torch warns of read-only memory."""
    return pixels if pixels.flags.writeable else pixels.copy()


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
