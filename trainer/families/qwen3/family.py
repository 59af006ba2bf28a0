"""Qwen3 without torch: the keys of its config.json, its sizes, its table of weights, and the family in one object.

Defaults of keys are transformers' (5.23).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dataset_builders.errors import InputError
from trainer.families.config_keys import (
    DecoderKeys,
    RotaryKeys,
    attention_of,
    decoder_shape,
    mlp_of,
    read_keys,
    rotary_of,
)
from trainer.model.family import Family
from trainer.model.layer import Layer
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape


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
    language = decoder_shape(
        keys,
        f"{path}: ",
        layers=(layer,) * keys.num_hidden_layers,
        rope_theta=theta,
        rotary_dim=keys.head_dim,
        tie_word_embeddings=keys.tie_word_embeddings,
    )
    return ModelShape(language=language)


def rules(shape: ModelShape) -> Iterator[Rule]:
    """Yield the table of weights, in HF's order of tensors."""
    return shape.language.rules("model.")


def part_of(name: str) -> str:
    """Return the part that a parameter of the bare model belongs to: "language"."""
    if not name.startswith("language."):
        raise ValueError(f"parameter {name} is not of language")
    return "language"


FAMILY = Family(
    model_type="qwen3",
    read_shape=read_shape,
    rules=rules,
    parts=("language",),
    part_of=part_of,
    model="trainer.families.qwen3.model:Qwen3Model",
    reference="transformers:Qwen3ForCausalLM",
)
