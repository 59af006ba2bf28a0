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
from trainer.checkpoint.hf_read import HFTensors, fill
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
from trainer.model.rules import Rule, global_names


def write_peft_directory(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: AdapterConfig, whole: Sequence[str]
) -> None:
    """Write adapters so that PEFT loads them.

    Args:
        tensors: the trained tensors of the whole model, by PEFT's names without their common prefix.
        whole: names of the modules that were trained whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    write_json(directory / ADAPTER_CONFIG, peft_config(config, modules, whole))


def load_peft_directory(models: Sequence[MegatronModule], directory: Path, rules: Sequence[Rule]) -> None:
    """Fill the trained parameters of this rank's chunks from a PEFT directory.

    Args:
        rules: the table of the whole model's trained parameters.

    Raises:
        InputError: a tensor is missing, is left over or has another shape.
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
    source: HFTensors, rules: Sequence[Rule], trained: Mapping[str, torch.Tensor], config: AdapterConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base model's tensors in the table's order, with the adapters merged into the adapted ones. Tensors that
    were not trained are unchanged, bit for bit.

    The arithmetic is that of PEFT's LoraLayer.merge, in float32; the result is rounded once, to the base's dtype.

    Args:
        source: the base model.
        rules: the base model's table of weights.
        trained: the trained tensors by PEFT's names without their common prefix.
    """
    for name in (name for rule in rules for name in rule.hf):
        module = name.removesuffix(".weight")
        if module + LORA_A not in trained:
            yield name, trained[name] if name in trained else source.get(name)
            continue
        stored = source.get(name)
        weight, a, b = (tensor.float() for tensor in (stored, trained[module + LORA_A], trained[module + LORA_B]))
        weight += b @ a * config.scaling
        if (magnitude := trained.get(module + MAGNITUDE)) is not None:
            weight = (magnitude.float() / torch.linalg.norm(weight, dim=1)).view(-1, 1) * weight
        yield name, weight.to(stored.dtype)
