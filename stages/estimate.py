"""How many parameters a model has and how much memory its training takes: from its shape alone, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEMPORAL_PATCH_SIZE = 2
_MERGE_SIZE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What decides the size of a Qwen3-VL."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    vision_depth: int
    vision_hidden_size: int
    vision_intermediate_size: int
    num_positions: int
    patch_size: int
    num_deepstack: int


def shape_of_embedded(config: Mapping[str, Any]) -> ModelShape:
    """From the settings of the embedded model."""
    same = ModelShape.__dataclass_fields__.keys() & config.keys()
    return ModelShape(
        **{name: config[name] for name in same},
        num_positions=config["position_grid"] ** 2,
        num_deepstack=len(config["deepstack_indexes"]),
    )


def shape_of_hf(config: Mapping[str, Any]) -> ModelShape:
    """From an HF directory's config.json."""
    text, vision = config["text_config"], config["vision_config"]
    return ModelShape(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        tie_word_embeddings=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        vision_depth=vision["depth"],
        vision_hidden_size=vision["hidden_size"],
        vision_intermediate_size=vision["intermediate_size"],
        num_positions=vision["num_position_embeddings"],
        patch_size=vision["patch_size"],
        num_deepstack=len(vision["deepstack_visual_indexes"]),
    )


def count_from_shape(shape: ModelShape) -> dict[str, int]:
    """Parameters of the vision encoder, the mergers and the language model; tied weights once."""
    d, width, inner = shape.hidden_size, shape.vision_hidden_size, shape.vision_intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = d * (2 * queries + 2 * keys) + 2 * shape.head_dim + 3 * d * shape.intermediate_size + 2 * d
    language = shape.num_layers * layer + d + shape.vocab_size * d * (1 if shape.tie_word_embeddings else 2)
    patch = 3 * _TEMPORAL_PATCH_SIZE * shape.patch_size**2
    attention = (3 * width + 3) * width + (width + 1) * width
    block = 2 * 2 * width + attention + (width + 1) * inner + (inner + 1) * width
    vision = patch * width + width + shape.num_positions * width + shape.vision_depth * block
    merged = width * _MERGE_SIZE**2
    merger = (merged + 1) * merged + (merged + 1) * d
    mergers = merger + 2 * width + shape.num_deepstack * (merger + 2 * merged)
    return {"vision": vision, "merger": mergers, "language": language}


def estimate_memory(shape: ModelShape, seq_len: int, max_patches: int, precision: str) -> dict[str, int]:
    """Bytes that one process needs to train, a bin at a time, nothing sharded and nothing recomputed.

    Weights, gradients and AdamW's two moments are exact. Activations are a rule of thumb for attention that keeps no
    score matrix: 34 half-precision bytes a token, layer and unit of width, and three copies of the logits in float32.
    """
    parameters = sum(count_from_shape(shape).values())
    size = 4 if precision == "float32" else 2
    language = 17 * size * seq_len * shape.hidden_size * shape.num_layers
    vision = 17 * size * max_patches * shape.vision_hidden_size * shape.vision_depth
    return {
        "weights": parameters * (4 if precision == "float32" else 6),  # bfloat16 keeps a float32 copy beside
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "activations": language + vision + 12 * seq_len * shape.vocab_size,
    }
