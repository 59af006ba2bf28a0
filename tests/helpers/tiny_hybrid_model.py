"""Tiny Qwen3.5 directories for tests: random weights, the tokenizer of the tiny Qwen3-VL, tensors of an mtp layer."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.process_dir import process_dir
from tests.helpers.tiny_model import tiny_hf_dir

DELTA, ATTENTION = "linear_attention", "full_attention"
_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    # Where a delta layer gives almost nothing, as at the first tokens of a sample whose query and key are nearly at
    # right angles, its norm multiplies rounding by up to eps^-0.5: with the published 1e-6, transformers' own training
    # leaves itself by 1e-3 within ten steps if its weights are changed by 3e-8.
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [],
}
_ODD_VISION = {"hidden_size": 144, "num_heads": 2, "intermediate_size": 96}  # a head size of 72, as in the large models
_HEADS_OF_128 = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "rms_norm_eps": 1e-6}
# Enough for four tensor-parallel ranks, or for two with two context-parallel ranks each.
MANY_HEADS = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
# As many value heads as key heads, tied. Three times as many, untied, delta layers first and last. Heads of 128, tied,
# and the published eps; "wide" has 16 value heads, so that CUDA graphs get the gradients of a delta layer's inputs as
# slices of one tensor.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "first": ({}, {}, True),
    "second": (
        {
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "linear_num_value_heads": 6,
            "layer_types": [DELTA, ATTENTION, DELTA, ATTENTION, DELTA],
        },
        _ODD_VISION,
        False,
    ),
    "third": ({**_HEADS_OF_128, "linear_num_value_heads": 4}, {}, True),
    "wide": ({**_HEADS_OF_128, "linear_num_value_heads": 16}, {}, True),
    # Layers enough for two virtual stages on each of two pipeline ranks.
    "deep": ({**MANY_HEADS, "num_hidden_layers": 8}, {}, True),
    # Layers that pipeline ranks cannot share evenly, of two kinds that cost differently.
    "odd": ({"num_hidden_layers": 7, "linear_num_value_heads": 6}, {}, True),
    "linear": ({"layer_types": [DELTA] * 4}, {}, True),
}


def hybrid_config(shape: str = "first") -> dict[str, Any]:
    text, vision, tied = SHAPES[shape]
    text = {**_TEXT, **text}
    base = json.loads((tiny_hf_dir() / "config.json").read_text())
    ids = {name: value for name, value in base.items() if name.endswith("_token_id")}
    vision = {**_VISION, **vision, "out_hidden_size": text["hidden_size"]}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **ids}
    return json.loads(json.dumps(config))


@functools.cache
def hybrid_hf_dir(shape: str = "first") -> Path:
    """Return the directory of a shape, none of whose tensors has a special value. It is made once per process."""
    directory = process_dir("hybrid") / shape
    shutil.copytree(tiny_hf_dir(), directory)
    config = hybrid_config(shape)
    model = transformers.Qwen3_5ForConditionalGeneration(transformers.AutoConfig.for_model(**config))
    randomize_hybrid(model)
    model.generation_config = transformers.GenerationConfig.from_pretrained(tiny_hf_dir())
    model.save_pretrained(directory)
    add_mtp(directory, config["text_config"]["hidden_size"])
    return directory


@functools.cache
def mtp_hf_dir(shape: str = "first") -> Path:
    """Return the directory of a shape with all tensors of multi-token prediction, whose names and sizes are vLLM's."""
    return with_mtp(hybrid_hf_dir(shape))


def with_mtp(hf_dir: Path) -> Path:
    """Return a copy of a directory with all tensors of multi-token prediction; its layer has the sizes of another."""
    directory = process_dir("mtp") / hf_dir.name
    shutil.copytree(hf_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    text = config["text_config"]
    text["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {n: t for n, t in load_file(directory / "model.safetensors").items() if not n.startswith("mtp.")}
    width, number = text["hidden_size"], text["layer_types"].index(ATTENTION)
    own = f"model.language_model.layers.{number}."
    sizes = {f"mtp.layers.0.{n.removeprefix(own)}": t.shape for n, t in tensors.items() if n.startswith(own)}
    sizes |= {"mtp.fc.weight": (width, 2 * width)}
    sizes |= {f"mtp.{norm}.weight": (width,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    draw = torch.Generator().manual_seed(3)
    for name, size in sizes.items():
        tensors[name] = (0.2 if "norm" in name else 0.08) * torch.randn(size, generator=draw)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@functools.cache
def talkative_hybrid_dir() -> Path:
    """Return the first shape with weights so large that its answers differ from prompt to prompt."""
    directory = process_dir("hybrid") / "talkative"
    shutil.copytree(hybrid_hf_dir(), directory)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or "embed_tokens" in name or name.endswith("lm_head.weight"):
            tensors[name] = 4 * tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def randomize_hybrid(model: torch.nn.Module) -> None:
    """Give norms values that have an effect, and decays lengths of a few to a few hundred tokens."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            if name.endswith("A_log"):
                param.copy_(noise - 1)
            elif name.endswith("dt_bias"):
                param.copy_(noise - 2)
            elif name.endswith("linear_attn.norm.weight") or (is_norm and "visual" in name):
                param.copy_(1 + 0.2 * noise)
            else:
                param.copy_((0.2 if is_norm or "conv1d" in name else 0.08) * noise)


def add_mtp(directory: Path, width: int) -> None:
    """Add tensors of the layer that predicts a second token, which transformers neither loads nor saves."""
    file = directory / "model.safetensors"
    draw = torch.Generator().manual_seed(3)
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=draw).bfloat16()
    tensors["mtp.layers.0.mlp.down_proj.weight"] = torch.randn(width, 7, generator=draw)
    save_file(tensors, file, metadata={"format": "pt"})
