"""The configs of a Qwen3-VL with chosen sizes and random weights. Without torch.

They have interleaved mrope, deepstack and grouped-query attention like the published models.
"""

from collections.abc import Mapping
from typing import Any


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json and preprocessor_config.json.

    Args:
        settings: the fields of `EmbeddedModelConfig` in stages/inputs/config.py.
        ids: ids of the tokenizer's control tokens.
    """
    config = {
        "model_type": "qwen3_vl",
        "text_config": _text(settings, ids),
        "vision_config": _vision(settings),
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": settings["tie_word_embeddings"],
        "dtype": settings["dtype"],
    }
    return {"config.json": config, "preprocessor_config.json": _processor(settings)}


def _text(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    half = settings["head_dim"] // 2
    height = width = half * 20 // 64  # Qwen3-VL divides 64 rotary pairs into 24 for time, 20 for rows, 20 for columns
    return {
        "vocab_size": settings["vocab_size"],
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["intermediate_size"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": settings["num_heads"],
        "num_key_value_heads": settings["num_kv_heads"],
        "head_dim": settings["head_dim"],
        "max_position_embeddings": 262144,
        "initializer_range": settings["initializer_range"],
        "tie_word_embeddings": settings["tie_word_embeddings"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": settings["rope_theta"],
            "mrope_interleaved": True,
            "mrope_section": [half - height - width, height, width],
        },
    }


def _vision(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": settings["vision_depth"],
        "hidden_size": settings["vision_hidden_size"],
        "num_heads": settings["vision_num_heads"],
        "intermediate_size": settings["vision_intermediate_size"],
        "out_hidden_size": settings["hidden_size"],
        "patch_size": settings["patch_size"],
        "num_position_embeddings": settings["position_grid"] ** 2,
        "deepstack_visual_indexes": list(settings["deepstack_indexes"]),
        "initializer_range": settings["initializer_range"],
    }


def _processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]},
        "patch_size": settings["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
