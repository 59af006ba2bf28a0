"""The sizes of a Qwen3-VL with experts, read from its config.json without torch. Defaults are transformers' (5.23)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dataset_builders.errors import InputError
from trainer.families.config_keys import BackboneKeys, Count, ExpertKeys, experts_of, mlp_of, read_keys
from trainer.families.qwen3_vl import shape as qwen3_vl
from trainer.model.layer import FeedForward
from trainer.model.shape import ModelShape

NUM_EXPERTS = 60  # transformers' default


class TextKeys(ExpertKeys, BackboneKeys):
    """The keys of text_config. transformers derives a missing head_dim; every published model has the key."""

    model_type: Literal["qwen3_vl_moe_text"] = "qwen3_vl_moe_text"
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 5632
    num_hidden_layers: Count = 24
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 16
    head_dim: int = Field(ge=2, multiple_of=2)
    tie_word_embeddings: bool = False  # transformers reads only the key of the whole model, never this one
    rope_parameters: qwen3_vl.TextRotaryKeys | None = None
    rope_scaling: qwen3_vl.TextRotaryKeys | None = None
    num_local_experts: Count = None  # another name of num_experts
    num_experts_per_tok: PositiveInt = 4
    moe_intermediate_size: PositiveInt = 1408
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[NonNegativeInt] | None = None


class VisionKeys(qwen3_vl.VisionKeys):
    """The keys of vision_config."""

    model_type: Literal["qwen3_vl_moe_vision", "qwen3_vl_moe"] = "qwen3_vl_moe_vision"


class Qwen3VLMoeKeys(qwen3_vl.Qwen3VLKeys):
    """The keys of config.json."""

    model_type: Literal["qwen3_vl_moe"]
    text_config: TextKeys
    vision_config: VisionKeys


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return the sizes in a parsed config.json."""
    keys = read_keys(Qwen3VLMoeKeys, config, path)
    return qwen3_vl.shape_with(keys, _feed_forwards(keys.text_config, f"{path}: text_config."), path)


def _feed_forwards(keys: TextKeys, where: str) -> list[FeedForward]:
    counts = {keys.num_experts, keys.num_local_experts} - {None}
    if len(counts) > 1:
        raise InputError(
            f"{where}num_experts is {keys.num_experts}, and num_local_experts {keys.num_local_experts}, another name "
            "of it; remove one"
        )
    experts = experts_of(keys, counts.pop() if counts else NUM_EXPERTS, where, may_be_transposed=True)
    dense, step = set(keys.mlp_only_layers or ()), keys.decoder_sparse_step
    return [
        experts if number not in dense and (number + 1) % step == 0 else mlp_of(keys)
        for number in range(keys.num_hidden_layers)
    ]
