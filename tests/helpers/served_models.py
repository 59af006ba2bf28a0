"""Tiny model directories whose sizes vLLM's kernels take, on a CPU and on a GPU: heads of 32 and more. Their answers
differ from prompt to prompt."""

import functools
import json
import shutil
from pathlib import Path

import transformers
from safetensors.torch import load_file, save_file

from stages.embedded_model.stage import make_tiny_hf_dir
from tests.helpers.process_dir import process_dir
from tests.helpers.tiny_experts_model import experts_config
from tests.helpers.tiny_hybrid_model import hybrid_config, randomize_hybrid
from tests.helpers.tiny_model import FIRST, TEXTS
from tests.helpers.tiny_text_model import randomize, text_config, write_text_model

FAMILIES = ("qwen3_vl", "qwen3", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
_DENSE = FIRST.model_copy(
    update={"head_dim": 64, "vision_hidden_size": 64, "initializer_range": 0.25, "max_pixels": 128 * 128}
)
_LOUDER = 4  # times the weights of linear layers and embeddings: tiny ones answer every prompt alike


@functools.cache
def served_hf_dir(family: str) -> Path:
    """Return the directory of a family. It is made once per process. Copy it before changing it."""
    directory = process_dir("served") / family
    if family == "qwen3":
        write_text_model(directory, text_config(head_dim=64))
        return _loud(directory)
    dense = make_tiny_hf_dir(process_dir("served") / "dense", _DENSE, TEXTS)
    if family == "qwen3_vl":
        return dense
    shutil.copytree(dense, directory)
    model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**_config(family)))
    (randomize_hybrid if family.startswith("qwen3_5") else randomize)(model)
    model.generation_config = transformers.GenerationConfig.from_pretrained(dense)
    model.save_pretrained(directory)
    return _loud(directory)


def _config(family: str) -> dict[str, object]:
    if family == "qwen3_5":
        config = hybrid_config("third")
    elif family == "qwen3_5_moe":
        config = experts_config("shared")
        config["text_config"] |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    else:
        config = experts_config("sparse")
        config["text_config"] |= {"head_dim": 64, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
        config["text_config"]["rope_parameters"]["mrope_section"] = [16, 8, 8]
    config["vision_config"] |= {"hidden_size": 64, "num_heads": 2}
    config["text_config"] |= {"max_position_embeddings": 4096}
    return json.loads(json.dumps(config))


def _loud(directory: Path) -> Path:
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or "embed_tokens" in name or name.endswith("lm_head.weight"):
            tensors[name] = _LOUDER * tensor
        elif directory.name == "qwen3_vl_moe" and ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()  # as published; transformers 5 saves it otherwise
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
