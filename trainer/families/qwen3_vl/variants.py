"""Qwen3-VL models with random weights: the configs that chosen sizes give, and the published sizes by name.

The keys of the sizes are the fields of `EmbeddedModelConfig` in stages/shared/inputs/config.py. The models have
interleaved mrope, deepstack and grouped-query attention like the published ones. Loads no torch.
"""

from collections.abc import Mapping
from typing import Any


def embedded_configs(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return config.json, preprocessor_config.json and video_preprocessor_config.json.

    Args:
        settings: sizes, see above.
        ids: ids of the tokenizer's control tokens.
    """
    pairs = settings["head_dim"] // 2
    height = width = pairs * 20 // 64  # Qwen3-VL divides 64 rotary pairs into 24 for time, 20 for rows, 20 for columns
    text = {
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
            "mrope_section": [pairs - height - width, height, width],
        },
    }
    vision = {
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
    config = {
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": settings["tie_word_embeddings"],
        "dtype": settings["dtype"],
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]},
        "patch_size": settings["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    # A video has the pixels of 768 small images at most, as a published one of 768 frames has.
    of_videos = {"shortest_edge": settings["min_pixels"], "longest_edge": 768 * settings["max_pixels"]}
    videos = {key: value for key, value in processor.items() if key != "image_processor_type"}
    videos |= {"video_processor_type": "Qwen3VLVideoProcessor", "size": of_videos}
    return {
        "config.json": config,
        "preprocessor_config.json": processor,
        "video_preprocessor_config.json": videos,
    }


_QWEN_PIXELS = {"min_pixels": 256 * 16**2, "max_pixels": 65_536 * 16**2}
_PUBLISHED = {"initializer_range": 0.02, "position_grid": 48, "dtype": "bfloat16", **_QWEN_PIXELS}

# The two published encoders; Qwen3.5 uses them too.
VISION_300M: dict[str, Any] = _PUBLISHED | {
    "vision_depth": 24,
    "vision_hidden_size": 1024,
    "vision_num_heads": 16,
    "vision_intermediate_size": 4096,
}
VISION_400M: dict[str, Any] = _PUBLISHED | {
    "vision_depth": 27,
    "vision_hidden_size": 1152,
    "vision_num_heads": 16,
    "vision_intermediate_size": 4304,
}
# For the digits, images of 8 x 8 points. With a wide range of initial weights a model of this width trains at once.
VISION_DIGITS: dict[str, Any] = {
    "vision_depth": 3,
    "vision_hidden_size": 64,
    "vision_num_heads": 4,
    "vision_intermediate_size": 128,
    "position_grid": 8,
    "min_pixels": 1024,
    "max_pixels": 2048,
    "initializer_range": 0.1,
    "dtype": "float32",
}

_EARLY, _LATE = (5, 11, 17), (8, 16, 24)  # layers of the vision encoder with deepstack features


def _published(
    vision: Mapping[str, Any], levels: tuple[int, ...], width: int, mlp: int, layers: int, heads: int, *, tied: bool
) -> dict[str, Any]:
    """Return the sizes of a published model: hidden size, width of the MLPs, layers, query heads, and whether the
    embeddings are tied."""
    return {
        "vocab_size": 151_936,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        **vision,
        "deepstack_indexes": levels,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_layers": layers,
        "num_heads": heads,
        "tie_word_embeddings": tied,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_tiny": {
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
    },
    # Starts from nothing in the recipe `easy_vqa`. The vocabulary is that of one small language.
    "qwen3_vl_100m": {
        "vocab_size": 2048,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "deepstack_indexes": (1, 3, 5),
        "rope_theta": 10_000.0,
        "vision_depth": 8,
        "vision_hidden_size": 512,
        "vision_num_heads": 8,
        "vision_intermediate_size": 2048,
        "position_grid": 48,
        "min_pixels": 4 * 16**2,
        "max_pixels": 2048 * 16**2,
        "initializer_range": 0.02,
        "dtype": "float32",
    },
    "qwen3_vl_2b": _published(VISION_300M, _EARLY, 2048, 6144, 28, 16, tied=True),
    "qwen3_vl_4b": _published(VISION_300M, _EARLY, 2560, 9728, 36, 32, tied=True),
    "qwen3_vl_8b": _published(VISION_400M, _LATE, 4096, 12_288, 36, 32, tied=False),
    "qwen3_vl_32b": _published(VISION_400M, _LATE, 5120, 25_600, 64, 64, tied=False),
}
