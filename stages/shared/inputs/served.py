"""Rules of vLLM for a model directory and an adapter, by the source of vLLM 0.24.0; the files are named beside each.

Some things it leaves out without an error: then a server answers as another model does.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.errors import in_ascii
from stages.shared.inputs.model_directory import WEIGHTS_INDEX, ModelDirectory, end_ids
from trainer.contract.peft import LORA_A, LORA_B, MAGNITUDE

# Keys of text_config that vLLM reads: without the first it does not load (models/qwen3_moe.py), without the other it
# keeps the delta rule's state in bfloat16 (models/config.py). transformers leaves them out when it saves a model, and
# athanor's families have no other value.
_KEYS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {"norm_topk_prob": True},
    "qwen3_5": {"mamba_ssm_dtype": "float32"},
    "qwen3_5_moe": {"mamba_ssm_dtype": "float32"},
}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # MaxLoRARanks (config/lora.py)
_EXPERTS = ".experts"


def missing_keys(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what config.json lacks for vLLM, in the form of its argument `hf_overrides`; {} if nothing."""
    text = config.get("text_config") or {}
    wanted = _KEYS.get(config["model_type"], {})
    missing = {name: value for name, value in wanted.items() if name not in text}
    return {"text_config": missing} if missing else {}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with the keys that vLLM reads."""
    return {**config, **{name: config[name] | keys for name, keys in missing_keys(config).items()}}


def lora_options(rank: int, modules: Collection[str]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for one adapter. `modules` are its modules' names in transformers."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(most for most in _RANKS if most >= rank),
        # Otherwise the vision encoder's part of an adapter is left out, which its log alone tells
        # (LoRAModelManager._create_lora_modules, lora/model_manager.py).
        "enable_tower_connector_lora": any(".visual." in f".{module}." for module in modules),
    }


def unservable_adapter(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """Return why vLLM does not take an adapter beside its base, in words; "" if it takes it.

    Args:
        config: the content of adapter_config.json.
        tensors: names of its tensors, without PEFT's prefix.
    """
    if config.get("use_dora"):
        return "it is a DoRA, which vLLM has not"  # lora/peft_helper.py
    whole = sorted(name for name in tensors if not name.endswith((LORA_A, LORA_B, MAGNITUDE)))
    if whole:
        return f"it holds {in_ascii(whole[0])}, trained whole, and vLLM takes matrices of LoRA alone"
    if config["r"] > _RANKS[-1]:
        return f"its rank is {config['r']}, and vLLM takes at most {_RANKS[-1]}"
    modules = {name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)}
    if "lm_head" in modules:
        # Only Qwen3ForCausalLM names it among its `embedding_modules`, and a tied head is the embedding.
        return "it adapts lm_head, which vLLM takes of few models alone"
    stacks = {name.removesuffix(".base_layer") for name in modules if _EXPERTS in name}
    alone = sorted(name for name in stacks if not {name, f"{name}.base_layer"} <= modules)
    if alone:
        # An assertion in LoRAModelManager._stack_moe_lora_weights; PEFT's names are `experts.base_layer` for the one
        # and `experts` for the other.
        return f"it adapts one of the two matrices of {in_ascii(alone[0])}, and vLLM takes both or none"
    return ""


def unservable(model: ModelDirectory) -> list[str]:
    """Return one line for each thing that keeps vLLM from loading a directory, or from answering as it was trained."""
    lines, config = [], model.config
    wanted = model.family.reference.rpartition(":")[2]
    if config.get("architectures") != [wanted]:
        found = in_ascii(json.dumps(config.get("architectures")))
        lines.append(f"config.json: architectures is {found}, and vLLM finds the model by it: [{wanted!r}]")
    for name, keys in missing_keys(config).items():
        lines.append(f"config.json: {name} has no {', '.join(keys)}, which vLLM reads")
    if config["model_type"] == "qwen3_vl_moe":
        text = config["text_config"]
        published = [text["moe_intermediate_size"], text["hidden_size"]]
        for name, tensor in model.tensors.items():
            # It transposes always (load_weights, models/qwen3_vl_moe.py), and transformers only where sizes differ.
            if name.endswith(".experts.down_proj") and tensor.shape[1:] != published:
                kept = f"{in_ascii(name)} is {tensor.shape}, as transformers 5 saves it"
                lines.append(f"{kept}, and vLLM reads the published {[tensor.shape[0], *published]}")
                break
    read = {tensor.file for tensor in model.tensors.values()}
    for file in sorted(model.path.glob("*.safetensors")):
        # Without an index vLLM loads every file (filter_duplicate_safetensors_files, model_loader/weight_utils.py).
        if file not in read and not (model.path / WEIGHTS_INDEX).is_file():
            lines.append(
                f"{in_ascii(file.name)} is no file of the model, and vLLM loads every *.safetensors; remove it"
            )
    if not end_ids(model.path):
        lines.append("generation_config.json: eos_token_id is missing, and a served answer would end at its limit")
    return lines


def pixel_flags(pixels: PixelConfig) -> str:
    """Return the argument of `vllm serve` that gives a directory these limits of an image's area."""
    size = {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels}
    return f"--mm-processor-kwargs '{json.dumps({'size': size})}'"
