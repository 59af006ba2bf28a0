"""Tiny Qwen3-VL directories for tests, made once a process for each shape."""

import functools
from pathlib import Path

from stages.embedded_model.stage import EmbeddedModelConfig, make_tiny_hf_dir
from tests.helpers.process_dir import process_dir

TEXTS = [
    "Which digit is in the picture?",
    "How many strokes does it have? Answer with one word.",
    "Which of the two is larger, the left one or the right one?",
    "The left one is larger.",
    "What is three plus four?",
    "seven",
    "system user assistant\n",
    "You are a helpful assistant. Think first, then answer.\n\nYes. No.",
    *[str(i) for i in range(10)],
]

FIRST = EmbeddedModelConfig(
    seed=1,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vision_depth=3,
    vision_hidden_size=32,
    vision_num_heads=2,
    vision_intermediate_size=64,
    deepstack_indexes=(0, 2),
    min_pixels=32 * 32,
    max_pixels=256 * 256,
)

# Other token ids and head counts, untied embeddings, heads wider than hidden_size / num_heads, three deepstack levels.
SECOND = EmbeddedModelConfig(
    seed=2,
    vocab_size=640,
    hidden_size=48,
    intermediate_size=96,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    tie_word_embeddings=False,
    vision_depth=4,
    vision_hidden_size=48,
    vision_num_heads=3,
    vision_intermediate_size=80,
    deepstack_indexes=(0, 1, 2),
    position_grid=10,
    min_pixels=32 * 32,
    max_pixels=256 * 256,
    special_tokens="first",
)

# Layers enough for two virtual stages on each of two pipeline ranks, with both deepstack levels in the first.
DEEP = FIRST.model_copy(update={"num_layers": 8})

# Heads enough for four tensor-parallel ranks, layers enough for four pipeline ranks.
WIDE = DEEP.model_copy(update={"num_heads": 8, "num_kv_heads": 4})

# Layers that pipeline ranks cannot share evenly.
ODD = FIRST.model_copy(update={"num_layers": 7})

SHAPES = {"first": FIRST, "second": SECOND, "deep": DEEP, "wide": WIDE, "odd": ODD}


@functools.cache
def tiny_hf_dir(shape: str = "first") -> Path:
    """Return the directory of a shape. It is made once per process and deleted at its end. Copy it before
    changing it."""
    directory = process_dir("tiny")
    return make_tiny_hf_dir(directory / shape, SHAPES[shape], TEXTS)
