"""Qwen3-VL models with experts and random weights: the configs that chosen sizes give, and the published sizes by name.

Loads no torch.
"""

from collections.abc import Mapping
from typing import Any

from trainer.families.qwen3_vl.variants import VISION_400M, VISION_DIGITS
from trainer.families.qwen3_vl.variants import embedded_configs as qwen3_vl_configs


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json and the files of the processors."""
    configs = qwen3_vl_configs(settings, ids)
    config, experts = configs["config.json"], settings["experts"]
    config["model_type"] = "qwen3_vl_moe"
    config["text_config"] |= {
        "num_experts": experts["count"],
        "num_experts_per_tok": experts["top_k"],
        "moe_intermediate_size": experts["width"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts["dense_layers"]),
    }
    return configs


_LARGE = VISION_400M | {
    "vocab_size": 151_936,
    "num_kv_heads": 4,
    "head_dim": 128,
    "rope_theta": 5e6,
    "deepstack_indexes": (8, 16, 24),
    "tie_word_embeddings": False,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_tiny": {
        **VISION_DIGITS,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "deepstack_indexes": (0, 1),
        "rope_theta": 10_000.0,
        "experts": {"count": 8, "top_k": 2, "width": 96, "dense_layers": (0,)},
    },
    "qwen3_vl_30b_a3b": {
        **_LARGE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_layers": 48,
        "num_heads": 32,
        "experts": {"count": 128, "top_k": 8, "width": 768},
    },
    "qwen3_vl_235b_a22b": {
        **_LARGE,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_layers": 94,
        "num_heads": 64,
        "experts": {"count": 128, "top_k": 8, "width": 1536},
    },
}
