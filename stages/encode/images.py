"""The pixel settings of a model directory, and patches as a PNG. `dataset_builders.pictures` makes the patches."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError

from dataset_builders.contracts.tokenized import PatchFormat, PixelConfig
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from stages.inputs.hf_directory import read_json
from trainer.model.registry import read_model
from trainer.model.shape import ModelShape

_BICUBIC = 3  # PIL's number for bicubic, which preprocessor_config.json uses
# For a text-only model, whose samples have no images: a patch of one pixel.
_NO_PICTURES = PixelConfig(
    min_pixels=1,
    max_pixels=1,
    patch_format=PatchFormat(
        patch_size=1, temporal_patch_size=1, merge_size=1, image_mean=(0.0, 0.0, 0.0), image_std=(1.0, 1.0, 1.0)
    ),
)


def load_image_config(hf_dir: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> PixelConfig:
    """Return the resizing and patch settings from preprocessor_config.json; the areas may be overridden.

    Raises:
        InputError: a field is missing, contradicts config.json, or has a value that is not supported.
    """
    family, shape = read_model(hf_dir)
    if family.image_processor is None:
        return _NO_PICTURES
    file = hf_dir / "preprocessor_config.json"
    raw = read_json(file)
    _check_supported(file, raw, family.image_processor.types)
    size = raw["size"] if isinstance(raw.get("size"), dict) else {}
    low = min_pixels or size.get("shortest_edge") or raw.get("min_pixels")
    high = max_pixels or size.get("longest_edge") or raw.get("max_pixels")
    if not low or not high:
        raise InputError(f"{file}: size has no shortest_edge and longest_edge; copy the model's own file again")
    config = _pixel_config(file, raw, low, high)
    if config.min_pixels > config.max_pixels:
        raise InputError(
            f"min_pixels={low} is more than max_pixels={high} ({file}); raise max_pixels or lower min_pixels"
        )
    _check_agrees(file, config.patch_format, shape)
    return config


def _pixel_config(file: Path, raw: dict[str, Any], low: Any, high: Any) -> PixelConfig:
    try:
        patch_format = PatchFormat(**{name: raw[name] for name in PatchFormat.model_fields})
        config = PixelConfig(min_pixels=low, max_pixels=high, patch_format=patch_format)
    except KeyError as error:
        raise InputError(f"{file} has no {error.args[0]}; copy the model's own file again") from error
    except ValidationError as error:
        first = error.errors()[0]
        field, value = first["loc"][0], str(first["input"])[:80]
        raise InputError(f"{file}: {field} is {value} ({first['msg']}); copy the model's own file again") from error
    if not min(patch_format.image_std) > 0:
        raise InputError(
            f"{file}: image_std is {raw['image_std']}; pixels are divided by it: copy the model's own file"
        )
    return config


def write_pixel_limits(hf_dir: Path, min_pixels: int | None, max_pixels: int | None) -> None:
    """Write pixel limits to a directory's configs, for `load_image_config` and other programs; None: keep the limit."""
    if not (hf_dir / "preprocessor_config.json").is_file():
        return  # a text-only model
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
    """Return the image of patches (h*w, 3 * patch_size^2) as a PNG within side x side pixels."""
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
    if not limits:
        return preprocessor
    # min_pixels and max_pixels are older names of the same limits and would contradict the new size.
    others = {name: value for name, value in preprocessor.items() if name not in ("min_pixels", "max_pixels")}
    return {**others, "size": {**(preprocessor.get("size") or {}), **limits}}


def _check_supported(file: Path, raw: dict[str, Any], types: Sequence[str]) -> None:
    kind = raw.get("image_processor_type")
    if kind not in types:
        raise InputError(f"{file}: image_processor_type is {kind!r}; supported: {', '.join(types)}")
    fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC}
    for key, value in fixed.items():
        if raw.get(key, value) != value:
            raise InputError(
                f"{file}: {key} is {raw[key]!r}; only {value!r} is supported, as Qwen's own models have it"
            )
    factor = raw.get("rescale_factor", 1 / 255)
    if not (isinstance(factor, int | float) and math.isclose(factor, 1 / 255)):
        raise InputError(f"{file}: rescale_factor is {raw['rescale_factor']!r}; only 1/255 is supported")


def _check_agrees(file: Path, patch_format: PatchFormat, shape: ModelShape) -> None:
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        name_in_shape = "spatial_merge_size" if name == "merge_size" else name
        value, value_in_shape = getattr(patch_format, name), getattr(shape.vision, name_in_shape)
        if value != value_in_shape:
            raise InputError(
                f"{file}: {name} is {value}, but vision_config.{name_in_shape} of config.json is {value_in_shape}; "
                "take both files from the same model"
            )
