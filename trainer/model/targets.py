"""The choice of layers that get adapters, and the sizes of these adapters.

This file loads no torch, unless the family's table of weights does.

A module is one of Hugging Face's linear layers; a layer of ours may hold several modules' weights in one matrix.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dataset_builders.errors import InputError, shown
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.run import TrainConfig
from trainer.model.adapter_sizes import AdapterSizes, PlaceSizes, Shared
from trainer.model.family import Family
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape

_WEIGHT = ".weight"
_OF_LAYER = re.compile(r"language\.decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Adapted:
    """A layer of ours that gets adapters."""

    ours: str  # name of the layer in the whole model
    rule: Rule
    chosen: tuple[bool, ...]  # for each HF tensor of the rule whether its module is adapted
    # the name of each HF tensor's module in PEFT. PEFT wraps a module once for each adapted parameter of it, so the
    # names of all but the last have a ".base_layer" for each parameter that follows.
    peft: tuple[str, ...]

    @property
    def modules(self) -> list[str]:
        return [name.removesuffix(_WEIGHT) for name in self.rule.hf]


@dataclass(frozen=True, slots=True)
class Matches:
    """The modules that a target adapts."""

    target: str
    modules: tuple[str, ...]  # names of the HF modules, in the model's order
    parameters: int  # number of parameters of their adapters


@dataclass(frozen=True, slots=True)
class _Module:
    """A module that can have an adapter: its rule, its index in the rule, its name and its role."""

    rule: Rule
    number: int
    name: str
    role: str

    def is_named_by(self, target: str) -> bool:
        return target == self.role or (target not in ROLES and re.fullmatch(target, self.name) is not None)


def adapted_layers(rules: Sequence[Rule], config: AdapterConfig) -> list[Adapted]:
    """Return the layers of the whole model with modules that the targets name."""
    modules = _modules(rules)
    named = {target: [m for m in modules if m.is_named_by(target)] for target in config.targets}
    for target, found in named.items():
        # A role may match nothing beside another target: the default names roles that only some models have.
        if not found and (target not in ROLES or not any(named.values())):
            raise _names_nothing(target, modules)
    chosen = {(m.rule.ours, m.number) for found in named.values() for m in found}
    stacks = [rule for rule in rules if rule.matrices and (rule.ours, 0) in chosen]
    layers = []
    for rule in rules:
        wanted = tuple((rule.ours, number) in chosen for number in range(len(rule.hf)))
        if any(wanted):
            layers.append(Adapted(rule.ours.removesuffix(_WEIGHT), rule, wanted, _peft_names(rule, stacks)))
    return layers


def _peft_names(rule: Rule, stacks: Sequence[Rule]) -> tuple[str, ...]:
    """Return the names of a rule's modules in PEFT, given the adapted rules of stacked matrices; see `Adapted`."""
    if not rule.matrices:
        return tuple(name.removesuffix(_WEIGHT) for name in rule.hf)
    module = rule.hf[0].rpartition(".")[0]
    later = [other for other in stacks[stacks.index(rule) + 1 :] if other.hf[0].rpartition(".")[0] == module]
    return (module + ".base_layer" * len(later),)


def _modules(rules: Sequence[Rule]) -> list[_Module]:
    """Return every module that can have an adapter, in HF's order."""
    return [
        _Module(rule, number, name.removesuffix(_WEIGHT), rule.role)
        for rule in rules
        for number, name in enumerate(rule.hf[: len(rule.sizes)])
    ]


def _names_nothing(target: str, modules: Sequence[_Module]) -> InputError:
    """Return the error with the nearest targets: roles, a whole name, or the end of a name as a regular expression."""
    roles = ", ".join(dict.fromkeys(module.role for module in modules))
    if target in ROLES:
        return InputError(f"train.adapter.targets: this model has no layers of role {target}; its roles: {roles}")
    near = {module.role: module.role for module in modules}
    for name in {re.sub(r"\d+", "0", module.name): module.name for module in reversed(modules)}.values():
        near |= {name: name, name.rpartition(".")[2]: rf".*\.{name.rpartition('.')[2]}"}
    words = re.sub(r"[^\w.]", "", target.replace(r"\d", "0").replace("\\", "")).lstrip(".")
    close = difflib.get_close_matches(words, near, n=3, cutoff=0.6)
    close = close or difflib.get_close_matches(words.rpartition(".")[2], near, n=3, cutoff=0)
    return InputError(
        f"train.adapter.targets: {shown(target)} names no linear layer of this model; nearest: "
        f"{', '.join(near[name] for name in close)}; roles: {roles}; other targets are regular expressions over the "
        "whole names of modules"
    )


def check_targets(train: TrainConfig, family: Family, rules: Sequence[Rule]) -> None:
    """Check that the targets of an adapter name layers of the model that are trained."""
    layers = adapted_layers(rules, train.adapter)
    if stacks := [layer.modules[0] for layer in layers if layer.rule.matrices]:
        _check_stacks(train.adapter, stacks[0])
    for target in train.adapter.targets:
        parts = {family.part_of(m.rule.ours) for m in _modules(rules) if m.is_named_by(target)}
        if parts and parts <= train.frozen:
            part = sorted(parts)[0]
            raise InputError(
                f"train.adapter.targets: {shown(target)} names layers of {part} alone, and train.{part}.frozen=true; "
                f"leave it out, or set train.{part}.frozen=false"
            )


def _check_stacks(config: AdapterConfig, name: str) -> None:
    """Check that an adapter of stacked matrices has only what PEFT computes with them (0.21, ParamWrapper)."""
    for field, value, is_possible, way_out in (
        ("kind", config.kind, config.kind == "lora", "set lora"),
        ("dropout", config.dropout, config.dropout == 0, "set 0"),
    ):
        if not is_possible:
            raise InputError(
                f"train.adapter.{field}={value} is not possible for {name}, whose experts' matrices are one tensor; "
                f"{way_out}, or leave experts out of train.adapter.targets"
            )


def list_matches(train: TrainConfig, family: Family, shape: ModelShape) -> list[Matches]:
    """Return the modules that each target adapts, without frozen ones; several targets may name the same module."""
    rules, config = family.weight_rules(shape), train.adapter
    # Raises for a target that names nothing.
    adapted_layers(rules, config)
    matches = []
    for target in config.targets:
        named = [m for m in _modules(rules) if m.is_named_by(target)]
        trained = [m for m in named if family.part_of(m.rule.ours) not in train.frozen]
        parameters = sum(max(1, m.rule.matrices) * _parameters(m.rule.sizes[m.number], config) for m in trained)
        matches.append(Matches(target, tuple(m.name for m in trained), parameters))
    return matches


def _parameters(size: tuple[int, int], config: AdapterConfig) -> int:
    """Return the number of parameters of a module's adapter; the module's weight is (out, in)."""
    out, width = size
    return config.rank * (out + width) + (out if config.kind == "dora" else 0)


def adapter_sizes(train: TrainConfig, family: Family, shape: ModelShape) -> AdapterSizes | None:
    """Return the sizes of the adapters of a training, or None if it has no adapters."""
    if train.adapter is None:
        return None
    rules = family.weight_rules(shape)
    chosen = {layer.rule.ours: layer.chosen for layer in adapted_layers(rules, train.adapter)}
    language = [PlaceSizes()] * shape.language.num_layers
    vision = {part: PlaceSizes() for part in family.parts if part != "language"}
    for rule in rules:
        if not rule.sizes:
            continue
        part = family.part_of(rule.ours)
        # Adapters of frozen parts keep their initial values and are not counted.
        is_trained = rule.ours in chosen and part not in train.frozen
        sizes = _layer_sizes(rule, chosen[rule.ours] if is_trained else (), train.adapter)
        if layer := _OF_LAYER.match(rule.ours):
            language[int(layer[1])] = language[int(layer[1])].plus(sizes)
        else:
            vision[part] = vision[part].plus(sizes)
    return AdapterSizes(language=tuple(language), vision=vision, has_float8_base=train.has_float8_base)


def _layer_sizes(rule: Rule, chosen: Sequence[bool], config: AdapterConfig) -> PlaceSizes:
    """Return the sizes of a layer of ours whose chosen modules have adapters; see trainer/layers/lora/adapter.py."""
    if rule.matrices:
        return _stack_sizes(rule, any(chosen), config)
    base = rule.numbers
    adapted = [size for size, is_chosen in zip(rule.sizes, chosen) if is_chosen]
    if not adapted:
        return PlaceSizes(base=base)
    rank, low, width = config.rank, config.rank * len(adapted), rule.sizes[0][1]
    rows, all_rows = sum(out for out, _ in adapted), sum(out for out, _ in rule.sizes)
    lengths, scaled = (rows, all_rows) if config.kind == "dora" else (0, 0)
    # DoRA keeps the sum that it scales, the scale, and the row lengths in the scale.
    if rule.axis == 1:
        return PlaceSizes(
            parameters=Shared(rank * width * len(adapted), rank * rows + lengths),
            products=Shared(low * width, low * all_rows + 2 * scaled),
            per_token=Shared(whole=low + scaled),
            base=base,
        )
    return PlaceSizes(
        parameters=Shared(rank * rows + lengths, rank * width * len(adapted)),
        products=Shared(low * all_rows + 2 * scaled, low * width),
        per_token=Shared(scaled, low),
        base=base,
    )


def _stack_sizes(rule: Rule, is_adapted: bool, config: AdapterConfig) -> PlaceSizes:
    """Return the sizes of stacked matrices that expert-parallel ranks divide."""
    if not is_adapted:
        return PlaceSizes(experts_base=rule.numbers)
    parameters = rule.matrices * sum(_parameters(size, config) for size in rule.sizes)
    return PlaceSizes(
        experts_parameters=parameters, per_token=Shared(whole=rule.used * config.rank), experts_base=rule.numbers
    )
