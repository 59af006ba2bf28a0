"""Parameters counted from a shape alone are those of the directory that is made from it."""

import json

import pytest

from stages.estimate import count_from_shape, estimate_memory, shape_of_embedded, shape_of_hf
from stages.hf_directory import count_parameters
from tests.helpers.tiny_model import FIRST, SECOND, tiny_hf_dir

# Settings of Qwen3-VL-2B-Instruct, as its config.json has them.
TEXT_2B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
VISION_2B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "deepstack_visual_indexes": [5, 11, 17],
}


@pytest.mark.parametrize(("name", "config"), [("first", FIRST), ("second", SECOND)])
def test_counts_are_exact(name, config):
    hf_dir = tiny_hf_dir(name)
    counted = count_parameters(hf_dir)
    assert count_from_shape(shape_of_embedded(config.model_dump())) == counted
    assert count_from_shape(shape_of_hf(json.loads((hf_dir / "config.json").read_text()))) == counted


def test_a_published_model_has_the_size_it_is_known_for():
    shape = shape_of_hf({"text_config": TEXT_2B, "vision_config": VISION_2B, "tie_word_embeddings": True})
    parts = count_from_shape(shape)
    assert parts["language"] == 1_720_574_976  # Qwen3-1.7B
    assert 2.1e9 < sum(parts.values()) < 2.15e9


def test_memory_counts_weights_gradients_and_moments():
    shape = shape_of_embedded(FIRST.model_dump())
    parameters = sum(count_from_shape(shape).values())
    single, half = (estimate_memory(shape, 1024, 512, precision) for precision in ("float32", "bfloat16"))
    assert single["weights"] + single["gradients"] + single["optimizer"] == 16 * parameters
    assert half["weights"] + half["gradients"] + half["optimizer"] == 18 * parameters
    assert half["activations"] < single["activations"]
    longer = estimate_memory(shape, 2048, 512, "float32")
    assert longer["activations"] > single["activations"] and longer["weights"] == single["weights"]
