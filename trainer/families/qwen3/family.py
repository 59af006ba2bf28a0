"""The Qwen3 family in one object, without torch."""

from trainer.families.qwen3.shape import read_shape
from trainer.model.family import Family


def part_of(name: str) -> str:
    """Return the part that a parameter of the bare model belongs to: "language"."""
    if not name.startswith("language."):
        raise ValueError(f"parameter {name} is not of language")
    return "language"


FAMILY = Family(
    model_type="qwen3",
    read_shape=read_shape,
    parts=("language",),
    part_of=part_of,
    model="trainer.families.qwen3.model:Qwen3Model",
    rules="trainer.families.qwen3.weights:rules",
    reference="transformers:Qwen3ForCausalLM",
)
