"""Adapters in PEFT's directory format for tests, with random numbers large enough to change answers, and merged
models."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 6
LINEAR = r".*(q_proj|v_proj|o_proj|up_proj|in_proj_qkv|out_proj|qkv|linear_fc[12])"


def write_adapter(
    directory: Path, hf_dir: Path, *, kind: str = "lora", rslora: bool = False, linear: str = LINEAR, **config: object
) -> Path:
    """Write an adapter of the linear layers of a model whose names match a pattern, and how its answers end."""
    directory.mkdir(parents=True)
    weights, generator = load_file(hf_dir / "model.safetensors"), torch.Generator().manual_seed(3)
    modules = [n.removesuffix(".weight") for n in weights if re.fullmatch(linear + r"\.weight", n)]
    tensors = {}
    for module in modules:
        weight = weights[f"{module}.weight"].float()
        out, width = weight.shape
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) / width**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * weight.std() * 0.3
        if kind == "dora":
            stretched = 1 + 0.2 * torch.rand(out, generator=generator)
            tensors[f"{name}.lora_magnitude_vector"] = weight.norm(dim=1) * stretched
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    known = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": rslora,
        "use_dora": kind == "dora",
        "target_modules": modules,
        "inference_mode": True,
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(known | config))
    shutil.copy(hf_dir / "generation_config.json", directory)
    return directory


def merge_adapter(directory: Path, hf_dir: Path, adapter_dir: Path) -> Path:
    """Write the model with an adapter of `write_adapter` merged into its weights, computed in float64 and
    rounded once."""
    shutil.copytree(hf_dir, directory)
    weights, adapter = load_file(hf_dir / "model.safetensors"), load_file(adapter_dir / "adapter_model.safetensors")
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    scaling = ALPHA / (RANK**0.5 if config["use_rslora"] else RANK)
    for module in config["target_modules"]:
        name, key = f"base_model.model.{module}", f"{module}.weight"
        a, b = (adapter[f"{name}.lora_{which}.weight"].double() for which in "AB")
        whole = weights[key].double() + scaling * b @ a
        if config["use_dora"]:
            whole *= (adapter[f"{name}.lora_magnitude_vector"].double() / whole.norm(dim=1))[:, None]
        weights[key] = whole.to(weights[key].dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
