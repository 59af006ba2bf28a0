"""PEFT directories with trained adapters, read and written, and the merging of adapters into the base model's weights.

adapter_config.json  adapter_model.safetensors   names and keys of PEFT 0.21, which other programs read
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.transformer.module import MegatronModule
from safetensors.torch import save_file

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from trainer.checkpoint.hf_weights import HFTensors, fill
from trainer.contract.adapter import AdapterConfig
from trainer.contract.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    peft_config,
)
from trainer.model.adapters import Adapted
from trainer.model.rules import ExpertsFirst, ExpertsLast, Rule, global_names


def write_peft_directory(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    layers: Sequence[Adapted],
    config: AdapterConfig,
    whole: Sequence[str],
) -> None:
    """Write adapters so that PEFT loads them.

    Args:
        tensors: the trained tensors of the whole model, by PEFT's names without their common prefix.
        whole: names of the modules that were trained whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    stacks = {layer.peft[0]: layer.modules[0] for layer in layers if layer.rule.matrices}
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    linear = [module for module in modules if module not in stacks]
    write_json(directory / ADAPTER_CONFIG, peft_config(config, linear, whole, [*stacks.values()]))


def load_peft_directory(models: Sequence[MegatronModule], directory: Path, rules: Sequence[Rule]) -> None:
    """Fill the trained parameters of this rank's chunks from a PEFT directory, which must hold these tensors and no
    others.

    Args:
        rules: the table of the whole model's trained parameters.
    """
    source = HFTensors(directory)
    table = {rule.ours: replace(rule, hf=tuple(PREFIX + name for name in rule.hf)) for rule in rules}
    wanted = {name for rule in table.values() for name in rule.hf}
    for names, what in ((wanted - source.names(), "lacks"), (source.names() - wanted, "holds, and nothing trains,")):
        if names:
            raise InputError(
                f"{directory} {what} {min(names)} and {len(names) - 1} tensors more; set train.adapter.targets and "
                "modules_to_save to the adapter's modules"
            )
    for model in models:
        for name, param in global_names(model):
            if name in table:
                fill(param, source, table[name], model)


def with_adapters(
    source: HFTensors,
    rules: Sequence[Rule],
    layers: Sequence[Adapted],
    trained: Mapping[str, torch.Tensor],
    config: AdapterConfig,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base model's tensors in the table's order, with the adapters merged into the adapted ones.

    Args:
        rules: the base model's table of weights, in the form in which `source` stores them.
        layers: the adapted layers of the whole model.
        trained: the trained tensors by PEFT's names without their common prefix.
    """
    stacks = {layer.rule.ours: layer for layer in layers if layer.rule.matrices}
    for rule in rules:
        if rule.ours in stacks:
            yield from _with_stack(source, rule, stacks[rule.ours], trained, config)
            continue
        for name in rule.hf:
            stored, module = source.get(name), name.removesuffix(".weight")
            if module + LORA_A not in trained:
                # A tensor that was not trained is unchanged, bit for bit.
                yield name, trained.get(name, stored)
                continue
            # The arithmetic of PEFT's LoraLayer.merge, in float32; the result is rounded once, to the base's dtype.
            weight, a, b = (tensor.float() for tensor in (stored, trained[module + LORA_A], trained[module + LORA_B]))
            weight += b @ a * config.scaling
            if (magnitude := trained.get(module + MAGNITUDE)) is not None:
                weight = (magnitude.float() / torch.linalg.norm(weight, dim=1)).view(-1, 1) * weight
            yield name, weight.to(stored.dtype)


def _with_stack(
    source: HFTensors, rule: Rule, layer: Adapted, trained: Mapping[str, torch.Tensor], config: AdapterConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of stacked matrices, which may be stored one by one or transposed, with the adapters merged."""
    (module,), experts = layer.peft, layer.rule.matrices
    a = ExpertsFirst(experts=experts).fuse([trained[module + LORA_A].float()], 1)
    b = ExpertsLast(experts=experts).fuse([trained[module + LORA_B].float()], 1)
    for name, change in zip(rule.hf, rule.packing.split(b @ a * config.scaling, len(rule.hf), 1)):
        stored = source.get(name)
        change = change if change.shape == stored.shape else change.transpose(1, 2)
        yield name, (stored.float() + change).to(stored.dtype)
