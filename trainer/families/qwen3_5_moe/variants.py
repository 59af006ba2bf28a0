"""Qwen3.5 models with experts and random weights: the configs that chosen sizes give; the models of Qwen3.5 and 3.6 by
name, a proxy of 4 layers, and a tiny model for a CPU.

Qwen3.6-35B-A3B has the shape of Qwen3.5-35B-A3B. Loads no torch.
"""

from collections.abc import Mapping
from typing import Any

from trainer.families.qwen3_5_vl.variants import PUBLISHED_DECODER, published_delta
from trainer.families.qwen3_5_vl.variants import embedded_configs as qwen3_5_configs
from trainer.families.qwen3_vl.variants import VISION_400M, VISION_DIGITS


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json and the files of the processors."""
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


def _large(width: int, layers: int, heads: int, value_heads: int, experts: tuple[int, int, int]) -> dict[str, Any]:
    """Return the sizes of a published model, or of one like it: hidden size, layers, query heads of the attention
    layers, value heads of the delta nets, and (number, experts of a token, width) of the experts."""
    count, top_k, inner = experts
    return {
        **VISION_400M,
        **PUBLISHED_DECODER,
        "num_kv_heads": 2,
        "tie_word_embeddings": False,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": heads,
        "delta": published_delta(value_heads),
        "experts": {"count": count, "top_k": top_k, "width": inner, "shared_width": inner},
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_tiny": {
        **VISION_DIGITS,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "deepstack_indexes": (),
        "rope_theta": 10_000.0,
        "rotary_fraction": 0.5,
        "delta": {"key_heads": 2, "value_heads": 4, "head_dim": 16, "attention_interval": 3},
        "experts": {"count": 8, "top_k": 2, "width": 64, "shared_width": 64},
    },
    "qwen3_5_moe_proxy": _large(4096, 4, 32, 64, (16, 2, 1024)),
    "qwen3_5_35b_a3b": _large(2048, 40, 16, 32, (256, 8, 512)),
    "qwen3_5_122b_a10b": _large(3072, 48, 32, 64, (256, 8, 1024)),
    "qwen3_5_397b_a17b": _large(4096, 60, 32, 64, (512, 10, 1024)),
}
