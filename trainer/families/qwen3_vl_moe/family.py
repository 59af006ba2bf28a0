"""Qwen3-VL with experts, without torch: the keys of its config.json, its sizes, and the family in one object.

It computes what Qwen3-VL computes (`trainer/families/qwen3_vl/model.py` tells the forward pass), with experts behind a
router (`trainer/parts/experts/module.py`) in place of most layers' MLPs. So it needs no model and no table of weights
of its own. Defaults of keys are transformers' (5.23).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dataset_builders.errors import InputError
from trainer.families.config_keys import Count, ExpertKeys, experts_of, mlp_of, read_keys
from trainer.families.qwen3_vl import family as qwen3_vl
from trainer.families.qwen3_vl_moe.variants import VARIANTS, embedded_configs
from trainer.model.shape import ModelShape
from trainer.parts.experts.part import WithExperts

NUM_EXPERTS = 60  # transformers' default


class TextKeys(ExpertKeys, qwen3_vl.MropeKeys):
    """The keys of text_config. transformers derives a missing head_dim; every published model has the key."""

    model_type: Literal["qwen3_vl_moe_text"] = "qwen3_vl_moe_text"
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 5632
    num_hidden_layers: Count = 24
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 16
    head_dim: int = Field(ge=2, multiple_of=2)
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
    text, where = keys.text_config, f"{path}: text_config."
    counts = {text.num_experts, text.num_local_experts} - {None}
    if len(counts) > 1:
        raise InputError(
            f"{where}num_experts is {text.num_experts}, and num_local_experts {text.num_local_experts}, another name "
            "of it; remove one"
        )
    experts = experts_of(text, counts.pop() if counts else NUM_EXPERTS, where, may_be_transposed=True)
    dense, step = set(text.mlp_only_layers or ()), text.decoder_sparse_step
    feed_forwards = [
        experts if number not in dense and (number + 1) % step == 0 else mlp_of(text)
        for number in range(text.num_hidden_layers)
    ]
    return qwen3_vl.shape_with(keys, feed_forwards, path)


FAMILY = dataclasses.replace(
    qwen3_vl.FAMILY,
    model_type="qwen3_vl_moe",
    read_shape=read_shape,
    reference="transformers:Qwen3VLMoeForConditionalGeneration",
    embedded=embedded_configs,
    sizes=(WithExperts,),
    variants=VARIANTS,
)
