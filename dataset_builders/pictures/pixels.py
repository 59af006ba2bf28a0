"""The only conversion of encoded images and of frames to uint8 patches, the same for training and evaluation.

decode, EXIF, alpha on white, RGB (`images.py`) -> smart_resize -> uint8 antialiased bicubic -> patches in HF order.
Normalisation and the temporal copy act on single bytes, so they happen later: in `pixel_values` here, on the device in
training. The result equals the result of transformers' torchvision image processor bit for bit.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.tokenized import PatchFormat, PixelConfig
from dataset_builders.pictures.images import MAX_ASPECT, image_size, read_rgb

_BLOCK = 1024  # number of patches that are normalised at a time


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
