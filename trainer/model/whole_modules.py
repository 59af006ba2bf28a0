"""Modules that are trained whole in addition to adapters, and the check of both.

This file loads no torch, unless the family's table of weights does.
"""

import re
from collections.abc import Iterator, Sequence

from dataset_builders.errors import InputError
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import TrainConfig
from trainer.model.family import Family
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape
from trainer.model.targets import Adapted, adapted_layers, check_targets


def check_adapter(train: TrainConfig, family: Family, shape: ModelShape) -> None:
    """Check that the modules to adapt or to train whole exist in the model and can be trained so."""
    if train.adapter is not None:
        rules = family.weight_rules(shape)
        check_targets(train, family, rules)
        whole_rules(rules, train.adapter)


def whole_modules(rules: Sequence[Rule], config: AdapterConfig) -> list[str]:
    """Return the names of the modules to save; none is inside another."""
    return sorted({found for rule in rules for name in rule.hf for found in _module_of(name, config)})


def whole_rules(rules: Sequence[Rule], config: AdapterConfig) -> list[Rule]:
    """Return the rules of the weights that are trained whole."""
    names = [name for rule in rules for name in rule.hf]
    for pattern in config.modules_to_save:
        if not any(re.fullmatch(pattern, module) for name in names for module in _within(name)):
            raise InputError(f"train.adapter.modules_to_save: {pattern!r} names no module with weights{_tied(names)}")
    adapted = {name for layer in adapted_layers(rules, config) for name, is_chosen in _chosen(layer) if is_chosen}
    found = []
    for rule in rules:
        whole = [name for name in rule.hf if _module_of(name, config)]
        if not whole:
            continue
        if len(whole) < len(rule.hf):
            (other, *_) = [name for name in rule.hf if name not in whole]
            raise InputError(
                f"train.adapter.modules_to_save names {whole[0]} and not {other}, which is in one matrix with it; name "
                "both or none"
            )
        if twice := adapted.intersection(whole):
            raise InputError(
                f"train.adapter: {min(twice)} would be adapted and trained whole; take it out of targets or of "
                "modules_to_save"
            )
        if rule.ours == "language.embedding.weight" and (tied := _tied(names)):
            raise InputError(f"train.adapter.modules_to_save names {whole[0]}{tied}; leave it out")
        found.append(rule)
    return found


def _chosen(layer: Adapted) -> Iterator[tuple[str, bool]]:
    return zip(layer.rule.hf, layer.chosen, strict=True)


def _within(name: str) -> list[str]:
    """Return the names of the modules that contain a tensor, outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _module_of(name: str, config: AdapterConfig) -> list[str]:
    """Return the outermost module to save that contains a tensor, as a list of one name; empty if none does."""
    return [m for m in _within(name) if any(re.fullmatch(p, m) for p in config.modules_to_save)][:1]


def _tied(names: Sequence[str]) -> str:
    is_tied = "lm_head.weight" not in names
    return "; the output projection is tied to the embeddings, and neither is trained whole" if is_tied else ""
