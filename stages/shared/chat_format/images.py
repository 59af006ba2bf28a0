"""The pixel settings of a model directory, of images and of videos, and patches as a PNG. `dataset_builders` makes the
patches."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError

from dataset_builders.contracts.manifest import describe_drift
from dataset_builders.contracts.sample import Video
from dataset_builders.contracts.tokenized import PatchFormat, PixelConfig
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from dataset_builders.videos.sampling import FramePlan, VideoConfig, plan_video
from stages.shared.chat_format.config import VideoFormat
from stages.shared.inputs.model_directory import (
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    VIDEO_PREPROCESSOR_CONFIG,
    ModelDirectory,
    read_json,
    read_settings,
)
from trainer.model.shape import ModelShape

_COPY = "copy the model's own file again"
_BICUBIC = 3  # PIL's number for bicubic, which preprocessor_config.json uses
_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # of transformers' Qwen2VLImageProcessor
# Of transformers' Qwen3VLVideoProcessor; a file may leave out each of them.
_VIDEO_DEFAULTS: dict[str, Any] = {
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": None,
    "max_video_tokens": 768,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
# For a text-only model, whose samples have no images: a patch of one pixel.
_NO_PICTURES = PixelConfig(
    min_pixels=1,
    max_pixels=1,
    patch_format=PatchFormat(
        patch_size=1, temporal_patch_size=1, merge_size=1, image_mean=(0.0, 0.0, 0.0), image_std=(1.0, 1.0, 1.0)
    ),
)


def load_image_config(
    model: ModelDirectory, min_pixels: int | None = None, max_pixels: int | None = None
) -> PixelConfig:
    """Return the resizing and patch settings of a model's image processor; the areas may be overridden."""
    family = model.family
    if family.image_processor is None:
        return _NO_PICTURES
    configs = {
        file: _image_config(file, raw, family.image_processor.types, min_pixels, max_pixels)
        for file, raw in model.image_settings.items()
    }
    file, config = _one(configs, "image_processor")
    _check_agrees(file, config.patch_format, model.shape)
    return config


def load_video_config(model: ModelDirectory, settings: VideoFormat | None = None) -> VideoConfig | None:
    """Return the settings of a model's video processor, with those that `settings` changes; None if the directory has
    no video processor."""
    family = model.family.video_processor
    if family is None or not model.video_settings:
        return None
    configs = {
        file: _video_config(file, raw, family.types, settings or VideoFormat())
        for file, raw in model.video_settings.items()
    }
    file, config = _one(configs, "video_processor")
    _check_agrees(file, config.patch_format, model.shape)
    # One encoder normalises the patches of both.
    if config.patch_format != (of_images := load_image_config(model).patch_format):
        drift = describe_drift(of_images.model_dump(), config.patch_format.model_dump())
        raise InputError(f"{file}: frames are cut otherwise than images ({drift}); take both files from the same model")
    return config


def plans_of(videos: Sequence[Video], config: VideoConfig | None, model: ModelDirectory) -> list[FramePlan]:
    """Return the frames that are read of each video; nothing is decoded. `config` is the result of `load_video_config`.
    Raises SkipSample as `plan_video`, InputError if there is a video and no settings."""
    if videos and config is None:
        raise InputError(
            f"{model.path} has no {VIDEO_PREPROCESSOR_CONFIG} (how videos are scaled), and a sample has a video; copy "
            "the model's"
        )
    return [plan_video(video, config) for video in videos]


def _video_config(file: Path, raw: dict[str, Any], types: Sequence[str], settings: VideoFormat) -> VideoConfig:
    _check_supported(file, raw, types, "video_processor_type")
    raw = _VIDEO_DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    if raw.get("num_frames"):
        raise InputError(f"{file}: num_frames is {raw['num_frames']}; only fps with min_frames and max_frames is read")
    size = raw["size"]
    if not (isinstance(size, Mapping) and size.keys() == {"shortest_edge", "longest_edge"} and all(size.values())):
        raise InputError(f"{file}: size has no shortest_edge and longest_edge alone (it is {str(size)[:80]}); {_COPY}")
    raw |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    raw |= settings.model_dump(exclude_none=True)
    raw["cap_pixels_per_frame"] = bool(raw["cap_pixels_per_frame"])  # transformers 5.23 reads null as false
    try:
        patch_format = PatchFormat(**{name: raw[name] for name in PatchFormat.model_fields})
        own = VideoConfig.model_fields.keys() - {"patch_format"}
        config = VideoConfig(patch_format=patch_format, **{name: raw[name] for name in own})
    except ValidationError as error:
        raise _bad_field(file, error) from error
    for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
        if getattr(config, low) > getattr(config, high):
            raise InputError(
                f"tokenize.videos: {low}={raw[low]} is more than {high}={raw[high]} ({file} has what is not set); "
                f"raise {high} or lower {low}"
            )
    return config


def _one(configs: Mapping[Path, Any], processor: str) -> tuple[Path, Any]:
    """Return the first file with its settings; InputError if another file has others."""
    (file, config), *others = configs.items()
    for other, theirs in others:
        if theirs != config:
            raise InputError(
                f"{file}: {processor} differs from {other.name} "
                f"({describe_drift(config.model_dump(), theirs.model_dump())}), and programs read either; delete one "
                "of them, or make them equal"
            )
    return file, config


def _bad_field(file: Path, error: ValidationError) -> InputError:
    first = error.errors()[0]
    field, value = first["loc"][0], str(first["input"])[:80]
    return InputError(f"{file}: {field} is {value} ({first['msg']}); {_COPY}")


def _image_config(
    file: Path, raw: dict[str, Any], types: Sequence[str], min_pixels: int | None, max_pixels: int | None
) -> PixelConfig:
    _check_supported(file, raw, types, "image_processor_type")
    size = _size_of(file, raw)
    low, high = min_pixels or size["shortest_edge"], max_pixels or size["longest_edge"]
    try:
        patch_format = PatchFormat(**{name: raw[name] for name in PatchFormat.model_fields})
        config = PixelConfig(min_pixels=low, max_pixels=high, patch_format=patch_format)
    except KeyError as error:
        raise InputError(f"{file} has no {error.args[0]}; copy the model's own file again") from error
    except ValidationError as error:
        raise _bad_field(file, error) from error
    if not min(patch_format.image_std) > 0:
        raise InputError(
            f"{file}: image_std is {raw['image_std']}; pixels are divided by it: copy the model's own file"
        )
    if config.min_pixels > config.max_pixels:
        raise InputError(
            f"min_pixels={low} is more than max_pixels={high} ({file}); raise max_pixels or lower min_pixels"
        )
    return config


def _size_of(file: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `shortest_edge` and `longest_edge`, the limits of an image's area, as transformers' processor reads them:
    min_pixels and max_pixels replace those of size, and without size its own defaults count."""
    size, olds = raw.get("size"), {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    if isinstance(size, Mapping) or size is None:
        size = dict(_DEFAULT_SIZE if size is None else size)
        for edge, old in olds.items():
            if raw.get(old) is not None:
                size[edge] = raw[old]
                size.pop(old, None)
        if size.keys() == olds.keys() and all(size.values()):
            return size
    raise InputError(
        f"{file}: size has no shortest_edge and longest_edge alone (it is {str(raw.get('size'))[:80]}); copy the "
        "model's own file again"
    )


def write_pixel_limits(hf_dir: Path, min_pixels: int | None, max_pixels: int | None) -> None:
    """Write pixel limits to a directory's configs, for `load_image_config` and other programs; None: keep the limit."""
    limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    limits = {name: value for name, value in limits.items() if value is not None}
    settings = read_settings(hf_dir, "image_processor")
    if limits:
        # min_pixels and max_pixels are older names of the same limits and would replace the new size.
        settings = {
            file: {name: value for name, value in raw.items() if name not in ("min_pixels", "max_pixels")}
            | {"size": {**_size_of(file, raw), **limits}}
            for file, raw in settings.items()
        }
    _write_settings(hf_dir, "image_processor", settings)


def write_video_config(hf_dir: Path, config: VideoConfig) -> None:
    """Write the settings of videos to a directory's configs, for `load_video_config` and other programs."""
    limits = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    own = config.model_dump(include={"fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens"})
    settings = read_settings(hf_dir, "video_processor")
    _write_settings(hf_dir, "video_processor", {file: {**raw, **own, "size": limits} for file, raw in settings.items()})


def _write_settings(hf_dir: Path, processor: str, settings: Mapping[Path, dict[str, Any]]) -> None:
    alone = hf_dir / (PREPROCESSOR_CONFIG if processor == "image_processor" else VIDEO_PREPROCESSOR_CONFIG)
    for file, changed in settings.items():
        write_json(file, {**read_json(file), processor: changed} if file.name == PROCESSOR_CONFIG else changed)
    if settings and alone not in settings:  # for programs that read this file alone
        write_json(alone, changed)


def patches_png(frames: Sequence[np.ndarray], grid: np.ndarray, patch_format: PatchFormat, side: int) -> bytes:
    """Return the image of patches as a PNG within side x side pixels. `frames` are (h*w, 3 * patch_size^2) uint8 each,
    one for an image, two for a temporal group, which stand beside each other."""
    size, merge = patch_format.patch_size, patch_format.merge_size
    rows, columns = int(grid[1]), int(grid[2])
    shape = (rows // merge, columns // merge, merge, merge, 3, size, size)
    blocks = [patches.reshape(shape).transpose(0, 2, 5, 1, 3, 6, 4) for patches in frames]
    image = Image.fromarray(np.hstack([block.reshape(rows * size, columns * size, 3) for block in blocks]))
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _check_supported(file: Path, raw: dict[str, Any], types: Sequence[str], key: str) -> None:
    kind = raw.get(key)
    if kind not in types:
        raise InputError(f"{file}: {key} is {kind!r}; supported: {', '.join(types)}")
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
