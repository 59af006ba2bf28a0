"""The form of a prompt: the pixels of its images, and its system prompt, as a model directory keeps them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PixelConfig
from stages.shared.chat_format.images import load_image_config
from stages.shared.inputs.model_directory import ModelDirectory

SYSTEM_PROMPT = "system_prompt.txt"  # file of an exported directory: the system prompt that the model was trained with


class PromptFormat(StrictModel):
    """The settings that a prompt depends on, apart from the question and the model's chat template."""

    pixels: PixelConfig
    system_prompt: str | None


def read_prompt_format(model: ModelDirectory, tokenized: Mapping[str, Any] | None = None) -> PromptFormat:
    """Return the prompt format of a model directory, or of the export of a training that starts from it.

    `tokenized` are the stats of the tokenized samples of that training. If a limit is missing, the directory's limit
    applies; if the system prompt is missing, there is none, even if the directory has one.
    """
    if tokenized is None:
        return PromptFormat(pixels=load_image_config(model), system_prompt=read_system_prompt(model.path))
    pixels = load_image_config(model, tokenized.get("min_pixels"), tokenized.get("max_pixels"))
    return PromptFormat(pixels=pixels, system_prompt=tokenized.get("system_prompt") or None)


def read_system_prompt(hf_dir: Path) -> str | None:
    """Return the system prompt that an exported directory was trained with, or None."""
    file = hf_dir / SYSTEM_PROMPT
    return file.read_text(encoding="utf-8") if file.is_file() else None
