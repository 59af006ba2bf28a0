"""Qwen3.5 models with random weights: the configs that chosen sizes give, and the sizes of the dense models of Qwen3.5,
3.6 and 3.8 by name.

The 27B model has the same shape in all three versions. Loads no torch.
"""

from collections.abc import Mapping
from typing import Any

from trainer.families.qwen3_vl.variants import VISION_300M, VISION_400M, VISION_DIGITS
from trainer.families.qwen3_vl.variants import embedded_configs as qwen3_vl_configs


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json and the files of the processors; they equal a Qwen3-VL's except for the decoder."""
    configs = qwen3_vl_configs(settings, ids)
    config, delta = configs["config.json"], settings["delta"]
    pairs = int(settings["head_dim"] * settings["rotary_fraction"]) // 2
    width = pairs * 10 // 32  # Qwen3.5 divides 32 rotary pairs into 11 for time, 11 for rows, 10 for columns
    height = (pairs - width) // 2
    config["model_type"] = "qwen3_5"
    config["text_config"] |= {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": settings["rope_theta"],
            "partial_rotary_factor": settings["rotary_fraction"],
            "mrope_interleaved": True,
            "mrope_section": [pairs - width - height, height, width],
        },
        "full_attention_interval": delta["attention_interval"],
        "linear_num_key_heads": delta["key_heads"],
        "linear_num_value_heads": delta["value_heads"],
        "linear_key_head_dim": delta["head_dim"],
        "linear_value_head_dim": delta["head_dim"],
    }
    return configs


_SMALL_VISION = VISION_300M | {
    "vision_depth": 12,
    "vision_hidden_size": 768,
    "vision_num_heads": 12,
    "vision_intermediate_size": 3072,
}
# What the published models share; those with experts too.
PUBLISHED_DECODER: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "rotary_fraction": 0.25,
    "rope_theta": 1e7,
    "deepstack_indexes": (),
}


def published_delta(value_heads: int) -> dict[str, int]:
    """Return the sizes of a published model's delta nets, which differ only in their value heads."""
    return {"key_heads": 16, "value_heads": value_heads, "head_dim": 128, "attention_interval": 4}


def _published(
    vision: Mapping[str, Any], width: int, mlp: int, layers: int, heads: int, kv: int, value_heads: int, *, tied: bool
) -> dict[str, Any]:
    """Return the sizes of a published model: hidden size, width of the MLPs, layers, query and key-value heads of the
    attention layers, value heads of the delta nets, and whether the embeddings are tied."""
    return {
        **PUBLISHED_DECODER,
        **vision,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        "tie_word_embeddings": tied,
        "delta": published_delta(value_heads),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_5_tiny": {
        **VISION_DIGITS,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "deepstack_indexes": (),
        "rope_theta": 10_000.0,
        "rotary_fraction": 0.5,
        "delta": {"key_heads": 2, "value_heads": 4, "head_dim": 16, "attention_interval": 4},
    },
    "qwen3_5_0_8b": _published(_SMALL_VISION, 1024, 3584, 24, 8, 2, 16, tied=True),
    "qwen3_5_2b": _published(VISION_300M, 2048, 6144, 24, 8, 2, 16, tied=True),
    "qwen3_5_4b": _published(VISION_300M, 2560, 9216, 32, 16, 4, 32, tied=True),
    "qwen3_5_9b": _published(VISION_400M, 4096, 12_288, 32, 16, 4, 32, tied=False),
    "qwen3_5_27b": _published(VISION_400M, 5120, 17_408, 64, 24, 4, 48, tied=False),
}
