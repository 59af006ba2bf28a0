"""The sizes of a Qwen3 model, read from its config.json without torch. Defaults are transformers' (5.23)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dataset_builders.errors import InputError
from trainer.families.config_keys import (
    DecoderKeys,
    RotaryKeys,
    attention_of,
    decoder_sizes,
    mlp_of,
    read_keys,
    rotary_of,
)
from trainer.model.layer import Layer
from trainer.model.shape import DecoderShape, ModelShape


class Qwen3Keys(DecoderKeys):
    """The keys of config.json."""

    model_type: Literal["qwen3"]
    tie_word_embeddings: bool = False
    layer_types: list[Literal["full_attention"]] | None = None


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return the sizes in a parsed config.json."""
    keys = read_keys(Qwen3Keys, config, path)
    if keys.layer_types is not None and len(keys.layer_types) != keys.num_hidden_layers:
        raise InputError(
            f"{path}: layer_types has {len(keys.layer_types)} layers, num_hidden_layers is {keys.num_hidden_layers}; "
            "take a complete qwen3 model"
        )
    _, theta = rotary_of(keys, RotaryKeys(), default_theta=10_000.0)
    layer = Layer(keys.hidden_size, attention_of(keys, f"{path}: "), mlp_of(keys))
    language = DecoderShape(
        **decoder_sizes(keys, f"{path}: "),
        layers=(layer,) * keys.num_hidden_layers,
        rope_theta=theta,
        rotary_dim=keys.head_dim,
        tie_word_embeddings=keys.tie_word_embeddings,
    )
    return ModelShape(language=language)
