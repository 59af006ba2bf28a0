"""A directory with random weights of a published size, without a tokenizer: enough to train on drawn bins."""

from pathlib import Path
from typing import Any

import torch
import transformers

from stages.inputs.config import EmbeddedModelConfig
from stages.inputs.transformers_progress import no_progress_bar
from stages.rate.large_model import write_large_model
from trainer.model.late_import import load
from trainer.model.registry import FAMILIES, get_family

VARIANTS = tuple(name for model_type in FAMILIES for name in get_family(model_type).variants)
CONTROL_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>", "<|endoftext|>")


def is_tiny(name: str) -> bool:
    """Whether a variant is meant for a CPU."""
    return name.endswith("_tiny")


def random_model(name: str) -> EmbeddedModelConfig:
    """Return the sizes of a variant; `NAME:4` has only four decoder layers."""
    variant, _, layers = name.partition(":")
    model = EmbeddedModelConfig(seed=0, variant=variant)
    return model.model_copy(update={"num_layers": int(layers)}) if layers else model


def config_of(model: EmbeddedModelConfig) -> dict[str, Any]:
    """Return config.json of a model whose control tokens have the last ids, the image token the very last."""
    ids = {token: model.vocab_size - 1 - place for place, token in enumerate(CONTROL_TOKENS)}
    return model.hf_configs(ids)["config.json"]


def write_random_model(directory: Path, model: EmbeddedModelConfig) -> None:
    """Write a directory of random weights: a model in bfloat16 as fast as the disk allows, without holding it."""
    config = config_of(model)
    if model.dtype == "bfloat16":
        write_large_model(directory, config)
        return
    reference = load(get_family(config["model_type"]).reference)(transformers.AutoConfig.for_model(**config))
    with no_progress_bar():
        reference.to(getattr(torch, model.dtype)).save_pretrained(directory)
