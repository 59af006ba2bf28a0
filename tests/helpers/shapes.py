"""The sizes of Qwen3-VL-2B, and shapes with some sizes changed, by the names that messages use."""

import dataclasses

from stages.shared.inputs.config import EmbeddedModelConfig
from trainer.model.layer import Layer
from trainer.model.shape import ModelShape

QWEN_2B = EmbeddedModelConfig(seed=0, variant="qwen3_vl_2b").shape


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
