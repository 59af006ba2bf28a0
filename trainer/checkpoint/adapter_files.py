"""Adapters as PEFT's directory, and their product with the base model's weights.

adapter_config.json  adapter_model.safetensors   names and keys of PEFT 0.21, which other programs read
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from dataset_builders.storage.files import write_json
from trainer.contract.adapter import AdapterConfig

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


def write_peft_directory(directory: Path, tensors: Mapping[str, torch.Tensor], config: AdapterConfig) -> None:
    """Write adapters so that PEFT loads them.

    Args:
        tensors: of the whole model, by PEFT's names without their common beginning.
    """
    directory.mkdir(parents=True, exist_ok=True)
    named = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / WEIGHTS, metadata={"format": "pt"})
    write_json(directory / CONFIG, _peft_config(config, [n.removesuffix(_A) for n in tensors if n.endswith(_A)]))


def _peft_config(config: AdapterConfig, modules: Sequence[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.kind == "dora",
        "target_modules": list(modules),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def merged(
    weights: Iterator[tuple[str, torch.Tensor | None]], adapters: Mapping[str, torch.Tensor], config: AdapterConfig
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """HF tensors with their adapters in them, by PEFT's own arithmetic (LoraLayer.merge)."""
    for name, weight in weights:
        module = name.removesuffix(".weight")
        if weight is None or module + _A not in adapters:
            yield name, weight
            continue
        delta = adapters[module + _B] @ adapters[module + _A] * config.scaling
        if module + _MAGNITUDE in adapters:
            length = torch.linalg.norm(weight + delta, dim=1).to(weight.dtype)
            yield name, (adapters[module + _MAGNITUDE] / length).view(-1, 1) * (weight + delta)
        else:
            yield name, weight + delta
