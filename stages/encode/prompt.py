"""How a question is put to a model: the pixels of its pictures and the system prompt before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import PixelConfig
from stages.encode.chat import read_system_prompt
from stages.encode.images import load_image_config


class PromptFormat(StrictModel):
    """All that a prompt depends on beside the question and the model's own template."""

    pixels: PixelConfig
    system_prompt: str | None


def read_prompt_format(hf_dir: Path, tokenized: Mapping[str, Any] | None = None) -> PromptFormat:
    """The prompt format of a model directory, or of the export of a training that starts from it.

    Args:
        tokenized: stats of the tokenized samples of that training. Limits that are missing there are the directory's; a
            system prompt that is missing there is none, whatever the directory says.

    Raises:
        InputError: no pixels can be made by preprocessor_config.json.
    """
    if tokenized is None:
        return PromptFormat(pixels=load_image_config(hf_dir), system_prompt=read_system_prompt(hf_dir))
    pixels = load_image_config(hf_dir, tokenized.get("min_pixels"), tokenized.get("max_pixels"))
    return PromptFormat(pixels=pixels, system_prompt=tokenized.get("system_prompt") or None)
