"""The trained parts of a frozen model: adapters of the layers that hold the requested modules, and whole modules."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer.contract.adapter import AdapterConfig
from trainer.layers.lora.adapter import Adapter, LinearAdapter
from trainer.model.adapters import Adapted, adapted_layers, rules_to_save
from trainer.model.rules import ExpertsFirst, ExpertsLast, Rule, Stacked, global_names


def add_adapters(model: torch.nn.Module, layers: Sequence[Adapted], config: AdapterConfig, seed: int) -> None:
    """Add freshly initialised adapters to a chunk's layers and freeze all other parameters of the chunk."""
    model.has_adapters = True
    for param in model.parameters():
        param.requires_grad = False
    for module in model.modules() if config.dropout else ():
        # If such a layer is recomputed, it draws the same dropout again.
        if hasattr(module, "is_random"):
            module.is_random = True
    for layer, linear in _modules(model, layers):
        if layer.rule.matrices:
            linear.adapt(_parameter_of(layer), config).initialise(layer.modules, seed)
            continue
        # Ours, megatron-core's and Transformer Engine's classes all have it in their names, and no class in common.
        is_column = "Column" in type(linear).__name__
        adapter = LinearAdapter(linear, layer.rule, layer.chosen, config, is_column=is_column)
        adapter.initialise(layer.modules, seed)
        linear.adapter = adapter
        # The class and not a wrapper around the module: the names of its parameters stay those of a checkpoint.
        linear.__class__ = _with_adapter(type(linear))


def begin_adapters(
    model: torch.nn.Module,
    layers: Sequence[Adapted],
    config: AdapterConfig,
    seed: int,
    read: Callable[[Rule, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Set the initial values of the adapters of a chunk that was sharded before it had memory; B is zero already.
    `read` returns the whole weight of a rule, given the rule and its parameter."""
    for layer, linear in _modules(model, layers):
        adapter = linear.adapter[_parameter_of(layer)] if layer.rule.matrices else linear.adapter
        adapter.initialise(layer.modules, seed)
        if config.kind == "dora":
            adapter.measure(read(layer.rule, linear.weight).to(linear.weight.dtype))


def _modules(model: torch.nn.Module, layers: Sequence[Adapted]) -> Iterator[tuple[Adapted, torch.nn.Module]]:
    """Yield each layer that the chunk holds, with the module that holds its weight."""
    ours = zip(model.named_parameters(), global_names(model), strict=True)
    modules = {whole: name.rpartition(".")[0] for (name, _), (whole, _) in ours}
    for layer in layers:
        if layer.rule.ours in modules:
            yield layer, model.get_submodule(modules[layer.rule.ours])


def _parameter_of(layer: Adapted) -> str:
    return layer.ours.rpartition(".")[2]


@functools.cache
def _with_adapter(kind: type) -> type:
    """Return the subclass of `kind` for linear layers that have an adapter."""

    class WithAdapter(kind):
        def forward(self, x: torch.Tensor, *args: object, **kwargs: object):
            out, bias = super().forward(x, *args, **kwargs)
            is_returned = self.te_return_bias if hasattr(self, "te_return_bias") else self.skip_bias_add
            has_none = self.bias is None or not self.bias.numel()  # Transformer Engine has an empty bias then
            # The bias that `out` already contains, which DoRA must not scale.
            added = None if is_returned or has_none else self.bias
            return self.adapter(self, x, out, added), bias

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return state | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)

    WithAdapter.__name__ = f"{kind.__name__}WithAdapter"
    return WithAdapter


@dataclass(frozen=True, slots=True)
class InRuns(Stacked):
    """The packing of one HF tensor whose rows form several runs; a tensor-parallel rank holds a part of each run."""

    relative: tuple[int, ...] = (1,)

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        return [self.relative]


def adapter_rules(layers: Sequence[Adapted], config: AdapterConfig) -> list[Rule]:
    """Return the table of the adapters' weights, with PEFT's names."""
    rules = []
    for layer in layers:
        if experts := layer.rule.matrices:
            module, _, name = layer.ours.rpartition(".")
            ours, (peft,) = f"{module}.adapter.{name}", layer.peft
            rules.append(Rule(f"{ours}.a", (f"{peft}.lora_A.weight",), ExpertsFirst(experts=experts), group="ep"))
            rules.append(Rule(f"{ours}.b", (f"{peft}.lora_B.weight",), ExpertsLast(experts=experts), group="ep"))
            continue
        runs = layer.rule.packing.runs(len(layer.rule.hf))
        for number, module in enumerate(layer.peft):
            if not layer.chosen[number]:
                continue
            ours, packing = f"{layer.ours}.adapter", InRuns(relative=runs[number])
            rules.append(Rule(f"{ours}.a.{number}", (f"{module}.lora_A.weight",)))
            rules.append(Rule(f"{ours}.b.{number}", (f"{module}.lora_B.weight",), packing))
            if config.kind == "dora":
                rules.append(Rule(f"{ours}.magnitude.{number}", (f"{module}.lora_magnitude_vector",), packing))
    return rules


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
