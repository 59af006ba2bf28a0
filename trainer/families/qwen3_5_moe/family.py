"""Qwen3.5 with experts, without torch: the keys of its config.json, its sizes, and the family in one object.

It computes what Qwen3.5 computes (`trainer/families/qwen3_5_vl/family.py` tells how that differs from Qwen3-VL), with
experts behind a router and one expert that every token uses (`trainer/parts/experts/module.py`) in place of the MLPs.
Defaults of keys are transformers' (5.23).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from trainer.families.config_keys import Count, ExpertKeys, experts_of, read_keys
from trainer.families.qwen3_5_moe.variants import VARIANTS, embedded_configs
from trainer.families.qwen3_5_vl import family as qwen3_5
from trainer.model.shape import ModelShape
from trainer.parts.experts.part import WithExperts


class TextKeys(ExpertKeys, qwen3_5.HybridKeys):
    """The keys of text_config."""

    model_type: Literal["qwen3_5_moe_text"] = "qwen3_5_moe_text"
    hidden_size: PositiveInt = 2048
    num_hidden_layers: Count = 40
    num_key_value_heads: PositiveInt = 2
    num_experts: Count = 256
    intermediate_size: Any = None  # no layer has an MLP
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512


class VisionKeys(qwen3_5.VisionKeys):
    """The keys of vision_config."""

    model_type: Literal["qwen3_5_moe_vision", "qwen3_5_moe"] = "qwen3_5_moe_vision"


class Qwen35MoeKeys(qwen3_5.Qwen35VLKeys):
    """The keys of config.json."""

    model_type: Literal["qwen3_5_moe"]
    text_config: TextKeys
    vision_config: VisionKeys


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return the sizes in a parsed config.json."""
    keys = read_keys(Qwen35MoeKeys, config, path)
    text, where = keys.text_config, f"{path}: text_config."
    shared = text.shared_expert_intermediate_size
    return qwen3_5.shape_with(keys, experts_of(text, text.num_experts, where, shared_size=shared), path)


FAMILY = dataclasses.replace(
    qwen3_5.FAMILY,
    model_type="qwen3_5_moe",
    read_shape=read_shape,
    reference="transformers:Qwen3_5MoeForConditionalGeneration",
    embedded=embedded_configs,
    sizes=(*qwen3_5.FAMILY.sizes, WithExperts),
    variants=VARIANTS,
)
