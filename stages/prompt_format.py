"""How a question is put to a model: the pixels of its pictures and the system prompt before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.pixels import PixelConfig
from stages.encode_chat import read_system_prompt
from stages.encode_image import load_image_config


class PromptFormat(StrictModel):
    """What a prompt depends on beside the question and the model's own template."""

    pixels: PixelConfig
    system_prompt: str | None


def read_prompt_format(hf_dir: Path, tokenized: Mapping[str, Any] | None = None) -> PromptFormat:
    """As a model directory says it, or as the export of a training from there would.

    Args:
        tokenized: the stats of what that training read. Limits that they do not have are the directory's; a system
            prompt that they do not have is none, whatever the directory says.

    Raises:
        InputError: preprocessor_config.json is not what pixels can be made with.
    """
    if tokenized is None:
        return PromptFormat(pixels=load_image_config(hf_dir), system_prompt=read_system_prompt(hf_dir))
    pixels = load_image_config(hf_dir, tokenized.get("min_pixels"), tokenized.get("max_pixels"))
    return PromptFormat(pixels=pixels, system_prompt=tokenized.get("system_prompt") or None)
