"""The form of a prompt: pixels of images and videos, the system prompt and boxes, as a model directory keeps them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dataset_builders.contracts.sample import Sample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.errors import InputError, plain_message
from dataset_builders.videos.sampling import VideoConfig
from stages.shared.chat_format.boxes import with_boxes_written
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.images import load_image_config, load_video_config
from stages.shared.inputs.model_directory import ModelDirectory, read_json

# Files of an exported directory: the system prompt and the form of boxes that the model was trained with.
SYSTEM_PROMPT, BOX_FORMAT = "system_prompt.txt", "box_format.json"


class PromptFormat(StrictModel):
    """The settings that a prompt depends on, apart from the question and the model's chat template."""

    pixels: PixelConfig
    system_prompt: str | None
    boxes: BoxFormat
    videos: VideoConfig | None = None  # None: the directory has no settings of videos, and none can be asked about

    def with_boxes(self, sample: Sample) -> Sample:
        """Return the sample with its boxes in its texts."""
        return with_boxes_written(sample, self.boxes, self.pixels)


def read_prompt_format(model: ModelDirectory, tokenized: Mapping[str, Any] | None = None) -> PromptFormat:
    """Return the prompt format of a model directory, or of the export of a training that starts from it.

    `tokenized` are the stats of the tokenized samples of that training. If a limit, the form of boxes or the settings
    of videos are missing (no sample has any), the directory's apply; if the system prompt is missing, there is none,
    even if the directory has one. A directory without a form of boxes has the default one.
    """
    stats = tokenized or {}
    boxes = BoxFormat.model_validate(stats["boxes"]) if stats.get("boxes") else read_box_format(model.path)
    return PromptFormat(
        pixels=load_image_config(model, stats.get("min_pixels"), stats.get("max_pixels")),
        system_prompt=read_system_prompt(model.path) if tokenized is None else stats.get("system_prompt") or None,
        boxes=boxes or BoxFormat(),
        videos=VideoConfig.model_validate(stats["videos"]) if stats.get("videos") else load_video_config(model),
    )


def read_system_prompt(hf_dir: Path) -> str | None:
    """Return the system prompt that an exported directory was trained with, or None."""
    file = hf_dir / SYSTEM_PROMPT
    return file.read_text(encoding="utf-8") if file.is_file() else None


def read_box_format(hf_dir: Path) -> BoxFormat | None:
    """Return the form of boxes that an exported directory was trained with, or None: no sample had boxes."""
    file = hf_dir / BOX_FORMAT
    if not file.is_file():
        return None
    try:
        return BoxFormat.model_validate(read_json(file))
    except ValidationError as error:
        first = error.errors()[0]
        key, why = ".".join(map(str, first["loc"])), plain_message(first["type"], first["msg"])
        raise InputError(f"{file}: {key} {why}; copy the file that athanor's export wrote") from error
