"""Tiny directories of models with experts for tests: random weights, the tokenizer of the tiny Qwen3-VL."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.process_dir import process_dir
from tests.helpers.tiny_hybrid_model import MANY_HEADS, hybrid_config, randomize_hybrid, with_mtp
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import randomize

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MANY_EXPERTS = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
# Of Qwen3-VL: the second layer has an MLP; every second layer has experts, whose matrices are square, so that a
# transposition does not show in a shape. Of Qwen3.5: a shared expert; three of many experts.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "listed": ("qwen3_vl_moe", {**_EXPERTS, "mlp_only_layers": [1]}),
    "sparse": ("qwen3_vl_moe", {**_EXPERTS, "moe_intermediate_size": 64, "decoder_sparse_step": 2}),
    "shared": ("qwen3_5_moe", {**_EXPERTS, **MANY_HEADS, "shared_expert_intermediate_size": 80}),
    "many": ("qwen3_5_moe", {**_MANY_EXPERTS, "shared_expert_intermediate_size": 48}),
}
# Routers of zeros with one expert per token: torch.topk takes the first of equal ones, and the weight is 1 whatever the
# logits are, so that all tokens of every layer stay with the first expert while the model trains.
LONE = "lone"
_EVERY = SHAPES | {
    LONE: ("qwen3_5_moe", SHAPES["shared"][1] | {"num_experts_per_tok": 1}),
    "late": ("qwen3_vl_moe", {**_EXPERTS, "mlp_only_layers": [0, 1]}),  # the first of two pipeline ranks has none
}


def experts_config(shape: str) -> dict[str, Any]:
    model_type, experts = _EVERY[shape]
    if model_type == "qwen3_vl_moe":
        config = json.loads((tiny_hf_dir() / "config.json").read_text())
        for name in ("text_config", "vision_config"):
            config[name].pop("model_type", None)
    else:
        config = hybrid_config("first")
        del config["text_config"]["intermediate_size"]
    config = {key: value for key, value in config.items() if key != "architectures"}
    return config | {"model_type": model_type, "text_config": config["text_config"] | experts}


@functools.cache
def experts_hf_dir(shape: str) -> Path:
    """Return the directory of a shape, none of whose tensors has a special value. It is made once per process."""
    directory = process_dir("experts") / shape
    shutil.copytree(tiny_hf_dir(), directory)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(**experts_config(shape))
    )
    if _EVERY[shape][0] == "qwen3_5_moe":
        randomize_hybrid(model)
    else:
        randomize(model)
    if shape == LONE:
        zero_routers(model)
    model.generation_config = transformers.GenerationConfig.from_pretrained(tiny_hf_dir())
    model.save_pretrained(directory)
    return directory


@functools.cache
def mtp_experts_hf_dir(shape: str) -> Path:
    """Return the directory of a shape of Qwen3.5 with all tensors of multi-token prediction."""
    return with_mtp(experts_hf_dir(shape))


def zero_routers(model: torch.nn.Module) -> None:
    """Give all experts of every layer equal logits."""
    for name, param in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.zeros_(param)
