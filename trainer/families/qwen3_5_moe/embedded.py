"""The configs of a Qwen3.5 with experts, with chosen sizes and random weights. Without torch."""

from collections.abc import Mapping
from typing import Any

from trainer.families.qwen3_5_vl.embedded import embedded_configs as qwen3_5_configs


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json and preprocessor_config.json."""
    configs = qwen3_5_configs(settings, ids)
    config, experts = configs["config.json"], settings["experts"]
    config["model_type"] = "qwen3_5_moe"
    del config["text_config"]["intermediate_size"]
    config["text_config"] |= {
        "num_experts": experts["count"],
        "num_experts_per_tok": experts["top_k"],
        "moe_intermediate_size": experts["width"],
        "shared_expert_intermediate_size": experts["shared_width"],
    }
    return configs
