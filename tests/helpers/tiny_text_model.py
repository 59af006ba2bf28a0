"""A tiny Qwen3 directory with the tokenizer of the tiny Qwen3-VL: a text model with random weights."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.process_dir import process_dir
from tests.helpers.tiny_model import tiny_hf_dir

# Tied and grouped; untied, with heads wider than hidden_size / num_attention_heads.
SHAPES: dict[str, dict[str, Any]] = {
    "first": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    "second": {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 32, "tie_word_embeddings": False},
}
_COMMON = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
}
# The template renders a conversation as Qwen3's own template does, but only texts.
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def text_config(shape: str = "first", **changes: object) -> dict[str, Any]:
    return {**_COMMON, **SHAPES[shape], **changes}


@functools.cache
def text_hf_dir(shape: str = "first") -> Path:
    """Return the directory of a shape, none of whose tensors has a special value. It is made once per process."""
    directory = process_dir("text") / shape
    write_text_model(directory, text_config(shape))
    return directory


def write_text_model(directory: Path, config: dict[str, Any]) -> None:
    """Write a complete directory: random weights, tokenizer, template, but no preprocessor_config.json."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_hf_dir() / name, directory / name)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    model = transformers.Qwen3ForCausalLM(transformers.AutoConfig.for_model(**json.loads(json.dumps(config))))
    randomize(model)
    generation = json.loads((tiny_hf_dir() / "generation_config.json").read_text())
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(directory)


def randomize(model: torch.nn.Module) -> None:
    """Remove special values from all tensors: norms become different from one, and biases different from zero."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.08 * noise)
