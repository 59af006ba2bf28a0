"""The table of weights of a language model behind a vision encoder: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.model.rules import Rule
from trainer.model.shape import ModelShape
from trainer.parts.vision.part import vision_rules


def rules(shape: ModelShape) -> Iterator[Rule]:
    """Yield the whole table, in HF's order of tensors."""
    yield from shape.language.rules("model.language_model.")
    yield from vision_rules(shape.vision)
