"""The trained parts of a frozen model: its adapters, and modules that are trained whole."""

from collections.abc import Iterator, Sequence

import torch

from trainer.contract.adapter import AdapterConfig
from trainer.layers.lora.adapter import Adapter
from trainer.layers.lora.convert import adapter_rules
from trainer.model.adapters import adapted_layers, rules_to_save
from trainer.model.rules import Rule, global_names


def trained_rules(rules: Sequence[Rule], config: AdapterConfig) -> list[Rule]:
    """Return the table of all trained weights with PEFT's names, adapters first."""
    return [*adapter_rules(adapted_layers(rules, config), config), *rules_to_save(rules, config)]


def train_whole(model: torch.nn.Module, rules: Sequence[Rule]) -> None:
    """Mark the parameters of a chunk that these rules name as trained whole."""
    ours = {rule.ours for rule in rules}
    for name, param in global_names(model):
        if name in ours:
            param.requires_grad = param.trained_whole = True


def trained_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a chunk's adapters and of its modules trained whole, whether or not currently frozen."""
    for module in model.modules():
        if isinstance(module, Adapter):
            yield from module.parameters()
    yield from (param for param in model.parameters() if getattr(param, "trained_whole", False))
