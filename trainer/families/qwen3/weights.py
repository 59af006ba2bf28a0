"""The table of Qwen3's weights: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.model.rules import Rule, decoder_rules
from trainer.model.shape import ModelShape


def rules(shape: ModelShape) -> Iterator[Rule]:
    """The whole table, in HF's order of tensors."""
    return decoder_rules(shape.language, "model.")
