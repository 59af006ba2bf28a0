"""The configs of a Qwen3.5 with chosen sizes and random weights. Without torch."""

from collections.abc import Mapping
from typing import Any

from trainer.families.qwen3_vl.embedded import embedded_configs as qwen3_vl_configs


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json and preprocessor_config.json; they equal a Qwen3-VL's except for the decoder."""
    configs = qwen3_vl_configs(settings, ids)
    config, delta = configs["config.json"], settings["delta"]
    config["model_type"] = "qwen3_5"
    config["text_config"] |= {
        "rope_parameters": _rope(settings),
        "full_attention_interval": delta["attention_interval"],
        "linear_num_key_heads": delta["key_heads"],
        "linear_num_value_heads": delta["value_heads"],
        "linear_key_head_dim": delta["head_dim"],
        "linear_value_head_dim": delta["head_dim"],
    }
    return configs


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    pairs = int(settings["head_dim"] * settings["rotary_fraction"]) // 2
    width = pairs * 10 // 32  # Qwen3.5 divides 32 rotary pairs into 11 for time, 11 for rows, 10 for columns
    height = (pairs - width) // 2
    return {
        "rope_type": "default",
        "rope_theta": settings["rope_theta"],
        "partial_rotary_factor": settings["rotary_fraction"],
        "mrope_interleaved": True,
        "mrope_section": [pairs - width - height, height, width],
    }
