"""Freezing the parts of a model."""

from typing import Any

from trainer.contract.run import TrainConfig
from trainer.model.family import Family


def freeze(module: Any, config: TrainConfig, family: Family) -> None:
    """Exclude the parameters of frozen parts from training. Call this before megatron-core's DDP wraps the model,
    because DDP allocates a buffer for every parameter that requires a gradient."""
    for name, param in module.named_parameters():
        if config.part(family.part_of(name)).frozen:
            param.requires_grad = False
