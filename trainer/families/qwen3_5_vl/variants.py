"""The dense models of Qwen3.5, 3.6 and 3.8 by name, and a tiny model that a CPU trains in minutes.

The 27B model has the same shape in all three versions.
"""

from typing import Any

from trainer.families.qwen3_vl.variants import VISION_300M, VISION_400M, VISION_DIGITS

_SMALL_VISION = VISION_300M | {
    "vision_depth": 12,
    "vision_hidden_size": 768,
    "vision_num_heads": 12,
    "vision_intermediate_size": 3072,
}
_LARGE = {"vocab_size": 248_320, "head_dim": 256, "rotary_fraction": 0.25, "rope_theta": 1e7, "deepstack_indexes": ()}


def _delta(value_heads: int) -> dict[str, int]:
    return {"key_heads": 16, "value_heads": value_heads, "head_dim": 128, "attention_interval": 4}


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
    "qwen3_5_0_8b": {
        **_LARGE,
        **_SMALL_VISION,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_layers": 24,
        "num_heads": 8,
        "num_kv_heads": 2,
        "tie_word_embeddings": True,
        "delta": _delta(16),
    },
    "qwen3_5_2b": {
        **_LARGE,
        **VISION_300M,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_layers": 24,
        "num_heads": 8,
        "num_kv_heads": 2,
        "tie_word_embeddings": True,
        "delta": _delta(16),
    },
    "qwen3_5_4b": {
        **_LARGE,
        **VISION_300M,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_layers": 32,
        "num_heads": 16,
        "num_kv_heads": 4,
        "tie_word_embeddings": True,
        "delta": _delta(32),
    },
    "qwen3_5_9b": {
        **_LARGE,
        **VISION_400M,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_layers": 32,
        "num_heads": 16,
        "num_kv_heads": 4,
        "tie_word_embeddings": False,
        "delta": _delta(32),
    },
    "qwen3_5_27b": {
        **_LARGE,
        **VISION_400M,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_layers": 64,
        "num_heads": 24,
        "num_kv_heads": 4,
        "tie_word_embeddings": False,
        "delta": _delta(48),
    },
}
