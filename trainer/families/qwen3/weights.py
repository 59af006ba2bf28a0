"""The table of Qwen3's weights: our parameters and their HF tensors."""

from collections.abc import Iterator

from trainer.contract.model_shape import ModelShape
from trainer.families.weight_rules import Rule, decoder_rules


def rules(shape: ModelShape) -> Iterator[Rule]:
    """The whole table, in HF's order of tensors."""
    return decoder_rules(shape.language, "model.")
