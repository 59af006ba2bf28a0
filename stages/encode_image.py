"""The one pixel path: encoded image bytes -> uint8 patches, the same for training and for evaluation.

decode, EXIF, alpha on white, RGB -> smart_resize -> uint8 antialiased bicubic -> patches in HF order. Normalisation
and the temporal copy are a function of single bytes, so they happen later (`pixel_values` here, the device in
training), and the result is bit-equal to what transformers' torchvision image processor gives.
"""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PatchFormat
from dataset_builders.images import MAX_ASPECT, open_rgb
from stages.hf_directory import read_json, read_model_config

_BICUBIC = 3  # PIL's number, which preprocessor_config.json uses
_PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")


class ImageConfig(StrictModel):
    """How an image is scaled and cut, as the model's preprocessor_config.json says."""

    min_pixels: int = Field(gt=0, description="images with fewer pixels are scaled up to this area")
    max_pixels: int = Field(gt=0, description="images with more pixels are scaled down to this area")
    patch_format: PatchFormat

    @property
    def factor(self) -> int:
        """Sides of a scaled image are multiples of this many pixels."""
        return self.patch_format.patch_size * self.patch_format.merge_size


def load_image_config(hf_dir: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageConfig:
    """Read preprocessor_config.json; the areas may be overridden.

    Raises:
        InputError: a field is missing, contradicts config.json, or asks for a path that this file does not have.
    """
    file = hf_dir / "preprocessor_config.json"
    raw = read_json(file)
    _check_supported(file, raw)
    size = raw.get("size", {})
    low = min_pixels or size.get("shortest_edge") or raw.get("min_pixels")
    high = max_pixels or size.get("longest_edge") or raw.get("max_pixels")
    if not low or not high:
        raise InputError(f"{file}: size has no shortest_edge and longest_edge; copy the model's own file again")
    if low > high:
        raise InputError(
            f"min_pixels={low} is more than max_pixels={high} ({file}); raise max_pixels or lower min_pixels"
        )
    try:
        patch_format = PatchFormat(
            patch_size=raw["patch_size"],
            temporal_patch_size=raw["temporal_patch_size"],
            merge_size=raw["merge_size"],
            image_mean=tuple(raw["image_mean"]),
            image_std=tuple(raw["image_std"]),
        )
    except KeyError as error:
        raise InputError(f"{file} has no {error.args[0]}; copy the model's own file again") from error
    _check_agrees(file, patch_format, read_model_config(hf_dir))
    return ImageConfig(min_pixels=low, max_pixels=high, patch_format=patch_format)


def smart_resize(height: int, width: int, config: ImageConfig) -> tuple[int, int]:
    """(height, width) to scale to: multiples of `config.factor`, area within the limits, aspect nearly kept.

    Raises:
        SkipSample: aspect, where the longer side is over 200 times the shorter.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise SkipSample("aspect", f"{width} x {height} pixels, over {MAX_ASPECT} to 1")
    factor = config.factor
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        new_height, new_width = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif new_height * new_width < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        new_height, new_width = (math.ceil(s * grow / factor) * factor for s in (height, width))
    return new_height, new_width


def encode_image(data: bytes, config: ImageConfig) -> tuple[np.ndarray, np.ndarray]:
    """One image's patches and grid.

    Args:
        data: the encoded image, any format Pillow reads.

    Returns:
        patches: (h*w, 3 * patch_size^2) uint8 in HF patch order, without the temporal copy.
        grid: (3,) int32: 1, h, w in patches.

    Raises:
        SkipSample: the bytes are no usable image, with the reason.
    """
    return encode_rgb(open_rgb(data), config)


def encode_rgb(image: Image.Image, config: ImageConfig) -> tuple[np.ndarray, np.ndarray]:
    """`encode_image` for an RGB image that is already open."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    height, width = smart_resize(pixels.shape[0], pixels.shape[1], config)
    planes = pixels.permute(2, 0, 1)[None]
    if planes.shape[-2:] != (height, width):
        # On uint8, not on floats: rounding between the two passes is part of the reference result.
        planes = torch.nn.functional.interpolate(
            planes, size=(height, width), mode="bicubic", antialias=True, align_corners=False
        )
    return _patchify(planes[0].numpy(), config.patch_format)


def pixel_values(patches: np.ndarray, patch_format: PatchFormat) -> np.ndarray:
    """What the HF processor calls pixel_values.

    Args:
        patches: (P, 3 * patch_size^2) uint8.

    Returns:
        (P, C) float32, C = 3 * temporal_patch_size * patch_size^2.
    """
    size, frames = patch_format.patch_size**2, patch_format.temporal_patch_size
    planes = patches.reshape(len(patches), 3, 1, size).astype(np.float32)
    # The products in float32, as the reference has them: with other means than 0.5 float64 would round differently.
    mean, std = (
        np.array(values, np.float32).reshape(3, 1, 1) * np.float32(255)
        for values in (patch_format.image_mean, patch_format.image_std)
    )
    planes = (planes - mean) / std
    return np.repeat(planes, frames, axis=2).reshape(len(patches), 3 * frames * size)


def patches_png(patches: np.ndarray, grid: np.ndarray, patch_format: PatchFormat, side: int) -> bytes:
    """The picture that the patches (h*w, 3 * patch_size^2) of one image show, as a PNG within side x side pixels."""
    size, merge = patch_format.patch_size, patch_format.merge_size
    rows, columns = int(grid[1]), int(grid[2])
    blocks = patches.reshape(rows // merge, columns // merge, merge, merge, 3, size, size)
    pixels = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * size, columns * size, 3)
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _patchify(planes: np.ndarray, patch_format: PatchFormat) -> tuple[np.ndarray, np.ndarray]:
    """(3, height, width) uint8 -> patches by blocks of merge_size x merge_size, row by row, and the grid."""
    size, merge = patch_format.patch_size, patch_format.merge_size
    rows, columns = planes.shape[1] // size, planes.shape[2] // size
    blocks = planes.reshape(3, rows // merge, merge, size, columns // merge, merge, size)
    patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, patch_format.patch_bytes)
    return patches, np.array([1, rows, columns], np.int32)


def _check_supported(file: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("image_processor_type")
    if kind not in _PROCESSOR_TYPES:
        raise InputError(f"{file}: image_processor_type is {kind!r}; supported: {', '.join(_PROCESSOR_TYPES)}")
    fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC}
    for key, value in fixed.items():
        if raw.get(key, value) != value:
            raise InputError(
                f"{file}: {key} is {raw[key]!r}; only {value!r} is supported, as Qwen's own models have it"
            )
    if not math.isclose(raw.get("rescale_factor", 1 / 255), 1 / 255):
        raise InputError(f"{file}: rescale_factor is {raw['rescale_factor']!r}; only 1/255 is supported")


def _check_agrees(file: Path, patch_format: PatchFormat, config: dict[str, Any]) -> None:
    names = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    vision = config.get("vision_config", {})
    for ours, theirs in names.items():
        if vision.get(theirs) != getattr(patch_format, ours):
            raise InputError(
                f"{file}: {ours} is {getattr(patch_format, ours)}, but vision_config.{theirs} of config.json is "
                f"{vision.get(theirs)}; take both files from the same model"
            )
