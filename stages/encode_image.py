"""What a model directory says about pixels, and patches as a picture again; `dataset_builders.pixels` makes them."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_json
from dataset_builders.contracts.tokenized import PatchFormat
from dataset_builders.pixels import PixelConfig
from stages.hf_directory import read_json, read_model_config

_BICUBIC = 3  # PIL's number, which preprocessor_config.json uses
_PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")


def load_image_config(hf_dir: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> PixelConfig:
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
    return PixelConfig(min_pixels=low, max_pixels=high, patch_format=patch_format)


def write_pixel_limits(hf_dir: Path, min_pixels: int | None, max_pixels: int | None) -> None:
    """Put areas into a directory's configs, where `load_image_config` and other programs read them; None: as it is."""
    limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    limits = {name: value for name, value in limits.items() if value is not None}
    preprocessor = read_json(hf_dir / "preprocessor_config.json")
    write_json(hf_dir / "preprocessor_config.json", _with_limits(preprocessor, limits))
    if (hf_dir / "processor_config.json").is_file():
        processor = read_json(hf_dir / "processor_config.json")
        if isinstance(processor.get("image_processor"), dict):
            processor["image_processor"] = _with_limits(processor["image_processor"], limits)
            write_json(hf_dir / "processor_config.json", processor)


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


def _with_limits(preprocessor: dict[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    # min_pixels and max_pixels are the older spelling of the same limits and would contradict the new size.
    kept = {k: v for k, v in preprocessor.items() if not limits or k not in ("min_pixels", "max_pixels")}
    return {**kept, "size": {**(preprocessor.get("size") or {}), **limits}} if limits else kept


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
