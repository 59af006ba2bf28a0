"""What is trained beside a frozen model: its adapters, and modules that are trained whole."""

from collections.abc import Iterator, Sequence

import torch

from trainer.contract.adapter import AdapterConfig
from trainer.layers.lora.adapter import LinearAdapter
from trainer.layers.lora.convert import adapter_rules
from trainer.model.rules import Rule, global_names
from trainer.model.targets import adapted_layers
from trainer.model.whole_modules import whole_rules


def trained_rules(rules: Sequence[Rule], config: AdapterConfig) -> list[Rule]:
    """The table of all that is trained, under PEFT's names: adapters first.

    Args:
        rules: the model's table of weights.

    Raises:
        InputError: a target or module names nothing, or modules cannot be trained whole.
    """
    return [*adapter_rules(adapted_layers(rules, config), config), *whole_rules(rules, config)]


def train_whole(model: torch.nn.Module, rules: Sequence[Rule]) -> None:
    """Have a chunk's parameters of these rules trained."""
    ours = {rule.ours for rule in rules}
    for name, param in global_names(model):
        if name in ours:
            param.requires_grad = param.trained_whole = True


def trained_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """A chunk's adapters and what is trained whole of it, frozen or not: all that the base model does not have."""
    for module in model.modules():
        if isinstance(module, LinearAdapter):
            yield from module.parameters()
    yield from (param for param in model.parameters() if getattr(param, "trained_whole", False))
