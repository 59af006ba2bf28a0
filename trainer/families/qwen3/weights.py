"""The table of Qwen3's weights: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.model.rules import Rule
from trainer.model.shape import ModelShape


def rules(shape: ModelShape) -> Iterator[Rule]:
    """Yield the whole table, in HF's order of tensors."""
    return shape.language.rules("model.")
