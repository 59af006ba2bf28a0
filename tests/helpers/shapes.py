"""The sizes of Qwen3-VL-2B, and shapes with some sizes changed, by the names that messages use."""

import dataclasses

from trainer.families.qwen3_vl.shape import read_shape
from trainer.model.layer import Layer
from trainer.model.shape import ModelShape

# The values of Qwen3-VL-2B-Instruct's config.json.
CONFIG_2B = {
    "model_type": "qwen3_vl",
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
QWEN_2B = read_shape(CONFIG_2B)


def changed(shape: ModelShape, **sizes: int) -> ModelShape:
    """Return a shape with changed sizes, named as in `named_sizes`: vision_num_heads, num_deepstack, and the language
    model's own."""
    vision = {name.removeprefix("vision_"): sizes.pop(name) for name in [*sizes] if name.startswith("vision_")}
    if "num_deepstack" in sizes:
        vision["deepstack_layers"] = tuple(range(sizes.pop("num_deepstack")))
    halves = [
        {
            name: sizes.pop(name)
            for name in [*sizes]
            if name in type(half).__dataclass_fields__ and name != "hidden_size"
        }
        for half in shape.language.layers[0].halves
    ]
    layers = tuple(
        Layer(layer.width, *(dataclasses.replace(half, **new) for half, new in zip(layer.halves, halves)))
        for layer in shape.language.layers
    )
    if "num_layers" in sizes:
        layers = layers[:1] * sizes.pop("num_layers")
    language = dataclasses.replace(shape.language, layers=layers, **sizes)
    return dataclasses.replace(shape, language=language, vision=dataclasses.replace(shape.vision, **vision))


def named_sizes(shape: ModelShape) -> dict[str, object]:
    """Return every size by the name that messages use."""
    vision = {f"vision_{name}": value for name, value in dataclasses.asdict(shape.vision).items()}
    sizes = {**dataclasses.asdict(shape.language), "num_layers": shape.language.num_layers}
    for half in shape.language.layers[0].halves:
        sizes |= dataclasses.asdict(half)
    return {**sizes, **vision, "num_deepstack": shape.num_deepstack}
