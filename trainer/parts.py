"""The parts of a model that can be frozen or have a learning rate of their own: vision, merger, language."""

import torch

from trainer.contract import TrainConfig

_MERGERS = ("vision.merger.", "vision.deepstack_mergers.")


def part_of(name: str) -> str:
    """The part a parameter of the bare model belongs to: "vision", "merger" or "language".

    Raises:
        ValueError: the name is of none of them.
    """
    if name.startswith(_MERGERS):
        return "merger"
    part = name.partition(".")[0]
    if part not in ("vision", "language"):
        raise ValueError(f"parameter {name} is neither of vision nor of language")
    return part


def freeze(module: torch.nn.Module, config: TrainConfig) -> None:
    """Take the parameters of frozen parts out of training.

    megatron-core's DDP gives a gradient buffer to whatever requires a gradient when it wraps: this comes before.
    """
    for name, param in module.named_parameters():
        if config.parts[part_of(name)].frozen:
            param.requires_grad = False
