"""The layers of a model that get adapters, the modules trained whole beside them, and the sizes of the adapters.

A module is one of Hugging Face's linear layers. A layer of ours may hold the weights of several modules in one matrix
(queries, keys and values; gate and up), so a layer has one adapter for each of its modules that the targets name.

This file loads no torch, unless a family's table of weights does.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dataset_builders.errors import InputError, shown
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.run import TrainConfig
from trainer.model.family import Family
from trainer.model.rules import Rule, index_of_layer
from trainer.model.shape import ModelShape

_WEIGHT = ".weight"


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


def adapted_layers(rules: Sequence[Rule], config: AdapterConfig) -> list[Adapted]:
    """Return the layers of the whole model with modules that the targets name.

    Raises:
        InputError: a target names no module.
    """
    modules = _modules(rules)
    named = {target: [m for m in modules if m.is_named_by(target)] for target in config.targets}
    for target, found in named.items():
        # A role may match nothing beside another target: the default names roles that only some models have.
        if not found and (target not in ROLES or not any(named.values())):
            raise _names_nothing(target, modules)
    # Several targets may name the same module.
    chosen = {(m.rule.ours, m.number) for found in named.values() for m in found}
    # The adapted parameters of experts, in HF's order: one name in PEFT depends on those that follow it.
    stacks = [rule for rule in rules if rule.matrices and (rule.ours, 0) in chosen]
    layers = []
    for rule in rules:
        wanted = tuple((rule.ours, number) in chosen for number in range(len(rule.hf)))
        if not any(wanted):
            continue
        peft = tuple(name.removesuffix(_WEIGHT) for name in rule.hf)
        if rule.matrices:
            # HF's name is that of a parameter ("...experts.gate_up_proj"). PEFT names its module ("...experts"), which
            # it wraps once for gate_up_proj and once more for down_proj if both are adapted.
            module = rule.hf[0].rpartition(".")[0]
            later = [other for other in stacks[stacks.index(rule) + 1 :] if other.hf[0].rpartition(".")[0] == module]
            peft = (module + ".base_layer" * len(later),)
        layers.append(Adapted(rule.ours.removesuffix(_WEIGHT), rule, wanted, peft))
    return layers


def rules_to_save(rules: Sequence[Rule], config: AdapterConfig) -> list[Rule]:
    """Return the rules of the weights that are trained whole, because `modules_to_save` names their modules.

    Raises:
        InputError: a pattern names nothing, or a weight that cannot be trained so.
    """
    names = [name for rule in rules for name in rule.hf]
    for pattern in config.modules_to_save:
        if not any(re.fullmatch(pattern, module) for name in names for module in _modules_around(name)):
            raise InputError(f"train.adapter.modules_to_save: {pattern!r} names no module with weights{_tied(names)}")
    adapted = {
        name
        for layer in adapted_layers(rules, config)
        for name, is_chosen in zip(layer.rule.hf, layer.chosen, strict=True)
        if is_chosen
    }
    found = []
    for rule in rules:
        whole = [name for name in rule.hf if _saved_module_of(name, config)]
        if not whole:
            continue
        # Gate and up, or queries, keys and values, are one parameter of ours, which is trained or is not.
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


def modules_to_save(rules: Sequence[Rule], config: AdapterConfig) -> list[str]:
    """Return the names of the modules that are trained whole, as PEFT's config lists them; none is inside another."""
    return sorted({module for rule in rules for name in rule.hf if (module := _saved_module_of(name, config))})


def check_adapter(train: TrainConfig, family: Family, shape: ModelShape) -> None:
    """Check that the modules to adapt or to train whole exist in the model and can be trained so."""
    config = train.adapter
    if config is None:
        return
    rules = family.weight_rules(shape)
    stacks = [layer.modules[0] for layer in adapted_layers(rules, config) if layer.rule.matrices]
    # PEFT's adapter of a stack of matrices (0.21, ParamWrapper) computes neither DoRA nor dropout.
    for field_name, value, is_possible, way_out in (
        ("kind", config.kind, config.kind == "lora", "set lora"),
        ("dropout", config.dropout, config.dropout == 0, "set 0"),
    ):
        if stacks and not is_possible:
            raise InputError(
                f"train.adapter.{field_name}={value} is not possible for {stacks[0]}, whose experts' matrices are one "
                f"tensor; {way_out}, or leave experts out of train.adapter.targets"
            )
    for target in config.targets:
        parts = {family.part_of(m.rule.ours) for m in _modules(rules) if m.is_named_by(target)}
        if parts and parts <= train.frozen:
            part = sorted(parts)[0]
            raise InputError(
                f"train.adapter.targets: {shown(target)} names layers of {part} alone, and train.{part}.frozen=true; "
                f"leave it out, or set train.{part}.frozen=false"
            )
    rules_to_save(rules, config)  # for its errors


def list_matches(train: TrainConfig, family: Family, shape: ModelShape) -> list[Matches]:
    """Return the modules that each target adapts, without frozen ones; several targets may name the same module."""
    rules, config = family.weight_rules(shape), train.adapter
    adapted_layers(rules, config)  # for its errors
    matches = []
    for target in config.targets:
        named = [m for m in _modules(rules) if m.is_named_by(target)]
        trained = [m for m in named if family.part_of(m.rule.ours) not in train.frozen]
        parameters = sum(max(1, m.rule.matrices) * _parameters(m.rule.sizes[m.number], config) for m in trained)
        matches.append(Matches(target, tuple(m.name for m in trained), parameters))
    return matches


@dataclass(frozen=True, slots=True)
class _Module:
    """A module that can have an adapter: its rule, its index in the rule, and its name."""

    rule: Rule
    number: int
    name: str

    def is_named_by(self, target: str) -> bool:
        """Whether a target, a role or a regular expression over whole names, names the module."""
        return target == self.rule.role or (target not in ROLES and re.fullmatch(target, self.name) is not None)


def _modules(rules: Sequence[Rule]) -> list[_Module]:
    """Return every module that can have an adapter, in HF's order."""
    return [
        _Module(rule, number, name.removesuffix(_WEIGHT))
        for rule in rules
        for number, name in enumerate(rule.hf[: len(rule.sizes)])
    ]


def _names_nothing(target: str, modules: Sequence[_Module]) -> InputError:
    """Return the error with the nearest targets: roles, a whole name, or the end of a name as a regular expression."""
    roles = ", ".join(dict.fromkeys(module.rule.role for module in modules))
    if target in ROLES:
        return InputError(f"train.adapter.targets: this model has no layers of role {target}; its roles: {roles}")
    near = {module.rule.role: module.rule.role for module in modules}
    # One module of each kind is enough to compare with: the first of those whose names differ only in numbers.
    for name in {re.sub(r"\d+", "0", module.name): module.name for module in reversed(modules)}.values():
        near |= {name: name, name.rpartition(".")[2]: rf".*\.{name.rpartition('.')[2]}"}
    # The target is a regular expression: its letters alone are compared with the names.
    words = re.sub(r"[^\w.]", "", target.replace(r"\d", "0").replace("\\", "")).lstrip(".")
    close = difflib.get_close_matches(words, near, n=3, cutoff=0.6)
    close = close or difflib.get_close_matches(words.rpartition(".")[2], near, n=3, cutoff=0)
    return InputError(
        f"train.adapter.targets: {shown(target)} names no linear layer of this model; nearest: "
        f"{', '.join(near[name] for name in close)}; roles: {roles}; other targets are regular expressions over the "
        "whole names of modules"
    )


def _modules_around(name: str) -> list[str]:
    """Return the names of the modules that contain a tensor, outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _saved_module_of(name: str, config: AdapterConfig) -> str | None:
    """Return the outermost module that contains a tensor and that a pattern of `modules_to_save` names, if any."""
    matching = (m for m in _modules_around(name) if any(re.fullmatch(p, m) for p in config.modules_to_save))
    return next(matching, None)


def _tied(names: Sequence[str]) -> str:
    is_tied = "lm_head.weight" not in names
    return "; the output projection is tied to the embeddings, and neither is trained whole" if is_tied else ""


# The sizes, for the estimate of memory.


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Counts of values that tensor-parallel ranks divide, and of values that every one of them holds."""

    sharded: int = 0
    replicated: int = 0

    def on(self, tp: int) -> float:
        """Return the number of values on each of `tp` ranks."""
        return self.sharded / tp + self.replicated

    def plus(self, other: "TensorParallel") -> "TensorParallel":
        return TensorParallel(self.sharded + other.sharded, self.replicated + other.replicated)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAdapterSizes:
    """The adapter sizes of a layer of the language model, or of a part of the vision encoder."""

    parameters: TensorParallel = TensorParallel()  # number of parameters of the trained adapters
    # number of values in the matrices that the adapters' products keep for backward: a layer's concatenated A's, and
    # its B's as blocks of a matrix
    products: TensorParallel = TensorParallel()
    # number of values that the adapters keep for backward, per token of the layer or part
    per_token: TensorParallel = TensorParallel()
    base: int = 0  # number of weights of all linear layers that can have adapters, without experts
    experts_parameters: int = 0  # number of parameters of the trained adapters of experts
    experts_base: int = 0  # number of weights of the experts that can have adapters

    def plus(self, other: "LayerAdapterSizes") -> "LayerAdapterSizes":
        return LayerAdapterSizes(
            parameters=self.parameters.plus(other.parameters),
            products=self.products.plus(other.products),
            per_token=self.per_token.plus(other.per_token),
            base=self.base + other.base,
            experts_parameters=self.experts_parameters + other.experts_parameters,
            experts_base=self.experts_base + other.experts_base,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """The adapter sizes of a whole model."""

    language: tuple[LayerAdapterSizes, ...]  # sizes of each layer
    # sizes of the other parts, "vision" and "merger", by name
    vision: Mapping[str, LayerAdapterSizes] = field(default_factory=dict)
    has_float8_base: bool = False  # whether the weights that `base` counts take one byte each in the language layers

    @property
    def parameters(self) -> int:
        layers = (*self.language, *self.vision.values())
        return round(sum(layer.parameters.on(1) + layer.experts_parameters for layer in layers))

    def trains(self, part: str) -> bool:
        """Whether a part other than the language model has adapters that are trained."""
        return part in self.vision and self.vision[part].parameters.on(1) > 0

    def saved_bytes(self, layers: Iterable[LayerAdapterSizes], size: int, tp: int, ep: int) -> float:
        """Return the bytes that a rank's weights of these language layers save against values of `size` bytes."""
        is_saved = self.has_float8_base
        return is_saved * (size - 1) * sum(layer.base / tp + layer.experts_base / ep for layer in layers)


def adapter_sizes(train: TrainConfig, family: Family, shape: ModelShape) -> AdapterSizes | None:
    """Return the sizes of the adapters of a training, or None if it has no adapters."""
    if train.adapter is None:
        return None
    rules = family.weight_rules(shape)
    chosen = {layer.rule.ours: layer.chosen for layer in adapted_layers(rules, train.adapter)}
    language = [LayerAdapterSizes()] * shape.language.num_layers
    vision = {part: LayerAdapterSizes() for part in family.parts if part != "language"}
    for rule in rules:
        if not rule.sizes:
            continue
        part = family.part_of(rule.ours)
        # Adapters of frozen parts keep their initial values and are not counted.
        is_trained = rule.ours in chosen and part not in train.frozen
        sizes = _layer_sizes(rule, chosen[rule.ours] if is_trained else (), train.adapter)
        if (number := index_of_layer(rule.ours)) is not None:
            language[number] = language[number].plus(sizes)
        else:
            vision[part] = vision[part].plus(sizes)
    return AdapterSizes(language=tuple(language), vision=vision, has_float8_base=train.has_float8_base)


def _layer_sizes(rule: Rule, chosen: Sequence[bool], config: AdapterConfig) -> LayerAdapterSizes:
    """Return the sizes of a layer of ours whose chosen modules have adapters; see trainer/layers/lora.py."""
    if rule.matrices:
        if not any(chosen):
            return LayerAdapterSizes(experts_base=rule.numbers)
        # Expert-parallel ranks divide the adapters like the matrices, tensor-parallel ranks divide neither. A token
        # keeps its product with A for each of its experts.
        return LayerAdapterSizes(
            experts_parameters=rule.matrices * sum(_parameters(size, config) for size in rule.sizes),
            per_token=TensorParallel(replicated=rule.used * config.rank),
            experts_base=rule.numbers,
        )
    base = rule.numbers
    adapted = [size for size, is_chosen in zip(rule.sizes, chosen) if is_chosen]
    if not adapted:
        return LayerAdapterSizes(base=base)
    rank, low, width = config.rank, config.rank * len(adapted), rule.sizes[0][1]
    rows, all_rows = sum(out for out, _ in adapted), sum(out for out, _ in rule.sizes)
    # DoRA has the length of each adapted row, and keeps three vectors over all rows of the layer: the sum that it
    # scales (per token), the scale, and the row lengths in the scale.
    lengths, scaled = (rows, all_rows) if config.kind == "dora" else (0, 0)
    # A is (rank, in) and B (out, rank). Ranks divide the axis that they divide of the weight, so A of a row-parallel
    # layer (axis 1) and B of a column-parallel one; the other is replicated.
    if rule.axis == 1:
        return LayerAdapterSizes(
            parameters=TensorParallel(rank * width * len(adapted), rank * rows + lengths),
            products=TensorParallel(low * width, low * all_rows + 2 * scaled),
            per_token=TensorParallel(replicated=low + scaled),
            base=base,
        )
    return LayerAdapterSizes(
        parameters=TensorParallel(rank * rows + lengths, rank * width * len(adapted)),
        products=TensorParallel(low * all_rows + 2 * scaled, low * width),
        per_token=TensorParallel(scaled, low),
        base=base,
    )


def _parameters(size: tuple[int, int], config: AdapterConfig) -> int:
    """Return the number of parameters of a module's adapter; the module's weight is (out, in)."""
    out, width = size
    return config.rank * (out + width) + (out if config.kind == "dora" else 0)
