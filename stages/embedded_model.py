"""The embedded model: a complete, tiny Qwen3-VL directory with random weights, made from a seed on any machine.

    hf/config.json  generation_config.json  preprocessor_config.json  model.safetensors
    hf/tokenizer.json  tokenizer_config.json  chat_template.jinja

It has every part of the real one (interleaved mrope, deepstack, grouped-query attention, Qwen's special tokens and
ChatML), so that nothing after it has to know whether it works on this or on a directory from the hub.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from pydantic import Field, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_json, write_text
from dataset_builders.contracts.store import StorePath, local_copy
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.cord_target import from_json, to_json, to_tags
from dataset_builders.cord_v2 import PROMPTS
from stages.artifact import Artifact, Stage, StageOutput
from stages.transformers_progress import no_progress_bar

VERSION = 1
HF_SUBDIR = "hf"
CORD_TRUTH = "ground_truth"  # CORD-V2's column, where the_cauldron has texts

# Qwen3's added tokens in Qwen3's order. The text tokens stay when a decoder drops special ones, as in Qwen3.
_CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
_CONTROL_TOKENS += ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"]
_CONTROL_TOKENS += ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
_TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# How Qwen2 and later split text before byte-level BPE: one digit a token, words with their leading space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- raise_exception('a message part must be a text or an image, not ' ~ part.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception('a role must be system, user or assistant, not ' ~ message.role) -}}
    {%- elif message.role == 'system' and not loop.first -%}
        {{- raise_exception('a system message must come first') -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ parts(message.content) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


class EmbeddedModelConfig(StrictModel):
    """Identity of the embedded model: its shape, its tokenizer's size and the seed of its weights."""

    seed: int = Field(ge=0, description="seed of the random weights")
    vocab_size: int = Field(
        ge=384, multiple_of=128, description="rows of the embedding; the tokenizer fills at most these"
    )
    hidden_size: int = Field(gt=0, description="width of the language model")
    intermediate_size: int = Field(gt=0, description="width of the language model's gated MLP")
    num_layers: int = Field(gt=0, description="layers of the language model")
    num_heads: int = Field(gt=0, description="query heads of the language model")
    num_kv_heads: int = Field(gt=0, description="key and value heads, a divisor of num_heads")
    head_dim: int = Field(ge=8, multiple_of=8, description="width of a language head")
    tie_word_embeddings: bool = Field(default=True, description="the output projection is the embedding")
    vision_depth: int = Field(gt=0, description="layers of the vision encoder")
    vision_hidden_size: int = Field(gt=0, description="width of the vision encoder")
    vision_num_heads: int = Field(gt=0, description="heads of the vision encoder")
    vision_intermediate_size: int = Field(gt=0, description="width of the vision encoder's MLP")
    deepstack_indexes: tuple[int, ...] = Field(description="vision layers whose output is added to the language layers")
    position_grid: int = Field(default=16, gt=0, description="side of the learned grid of vision positions")
    patch_size: int = Field(default=16, gt=0, description="side of a patch in pixels")
    min_pixels: int = Field(gt=0, description="images with fewer pixels are scaled up to this area")
    max_pixels: int = Field(gt=0, description="images with more pixels are scaled down to this area")
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    initializer_range: float = Field(default=0.02, gt=0, le=1, description="standard deviation of the random weights")
    special_tokens: Literal["last", "first"] = Field(
        default="last", description="ids of the special tokens: after the text tokens as in Qwen, or before"
    )

    @model_validator(mode="after")
    def _shape_fits(self) -> "EmbeddedModelConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.vision_hidden_size % (4 * self.vision_num_heads):
            raise ValueError(
                f"vision_hidden_size={self.vision_hidden_size} is not a multiple of 4 x vision_num_heads="
                f"{4 * self.vision_num_heads}: a vision head has rotary pairs for rows and for columns"
            )
        if any(not 0 <= i < self.vision_depth for i in self.deepstack_indexes):
            raise ValueError(f"deepstack_indexes={self.deepstack_indexes} must lie in [0, {self.vision_depth})")
        if len(self.deepstack_indexes) >= self.num_layers:
            levels = len(self.deepstack_indexes)
            raise ValueError(f"{levels} deepstack levels need more layers than num_layers={self.num_layers}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")
        return self


def make_tiny_hf_dir(directory: Path, config: EmbeddedModelConfig, texts: list[str]) -> Path:
    """Write a complete Qwen3-VL directory; the same arguments give the same bytes in any process.

    Args:
        directory: made when missing.
        texts: what the tokenizer is trained on.

    Returns:
        `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, config)
    ids = {token: tokenizer.token_to_id(token) for token in _CONTROL_TOKENS}
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", _tokenizer_config(ids))
    write_text(directory / "chat_template.jinja", _CHAT_TEMPLATE)
    write_json(directory / "preprocessor_config.json", _preprocessor_config(config))
    _save_model(directory, config, ids)
    return directory


def _train_tokenizer(texts: list[str], config: EmbeddedModelConfig) -> Tokenizer:
    added = [AddedToken(t, special=True, normalized=False) for t in _CONTROL_TOKENS]
    added += [AddedToken(t, special=False, normalized=False) for t in _TEXT_TOKENS]
    first = config.special_tokens == "first"
    tokenizer = Tokenizer(BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=config.vocab_size - (0 if first else len(added)),
        special_tokens=added[::-1] if first else [],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def _tokenizer_config(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "unk_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": [token for token in ids if token not in ("<|endoftext|>", "<|im_end|>")],
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "model_max_length": 262144,
    }


def _preprocessor_config(config: EmbeddedModelConfig) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        "patch_size": config.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _save_model(directory: Path, config: EmbeddedModelConfig, ids: Mapping[str, int]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = transformers.Qwen3VLForConditionalGeneration(_model_config(config, ids))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=False,
    )
    with no_progress_bar():
        model.save_pretrained(directory)


def _model_config(config: EmbeddedModelConfig, ids: Mapping[str, int]) -> "transformers.Qwen3VLConfig":
    half = config.head_dim // 2
    height = width = half * 20 // 64  # Qwen3-VL divides 64 rotary pairs into 24 for time, 20 for rows, 20 for columns
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": 262144,
            "initializer_range": config.initializer_range,
            "tie_word_embeddings": config.tie_word_embeddings,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "mrope_interleaved": True,
                "mrope_section": [half - height - width, height, width],
            },
        },
        vision_config={
            "depth": config.vision_depth,
            "hidden_size": config.vision_hidden_size,
            "num_heads": config.vision_num_heads,
            "intermediate_size": config.vision_intermediate_size,
            "out_hidden_size": config.hidden_size,
            "patch_size": config.patch_size,
            "num_position_embeddings": config.position_grid**2,
            "deepstack_visual_indexes": list(config.deepstack_indexes),
            "initializer_range": config.initializer_range,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=config.tie_word_embeddings,
        dtype="float32",
    )


def _raw_texts(directory: StorePath) -> Iterator[str]:
    files = sorted(directory.glob("*/*.parquet"))
    if not files:
        raise InputError(
            f"{directory} holds no <subset>/*.parquet to train the embedded model's tokenizer on; "
            "give a model: --set model=DIRECTORY_OR_HUB_NAME"
        )
    for path in files:
        try:
            file = local_copy(path)
            if CORD_TRUTH in pq.read_schema(file).names:
                yield from _cord_texts(pq.read_table(file, columns=[CORD_TRUTH])[CORD_TRUTH].to_pylist())
                continue
            rows = pq.read_table(file, columns=["texts"])["texts"].to_pylist()
        except (pa.ArrowException, KeyError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}: the embedded model's tokenizer learns from its column 'texts', which cannot be read "
                f"({' '.join(str(error).split())[:160]}); mend the file, or give a model: "
                "--set model=DIRECTORY_OR_HUB_NAME"
            ) from error
        turns = (turn for row in rows for turn in row or () if turn)  # what is null, convert names
        yield from (text for turn in turns for text in (turn["user"], turn["assistant"]) if text)


def _cord_texts(truths: Iterable[str | None]) -> Iterator[str]:
    """What the cord_v2 builder may ask and have learnt; what it cannot read, convert names."""
    yield from PROMPTS.values()
    for truth in truths:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            parse = from_json(truth)["gt_parse"]
            yield from (to_json(parse), to_tags(parse))


def _run(config: EmbeddedModelConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    texts = list(_raw_texts(inputs["raw"].dir))
    directory = make_tiny_hf_dir(work / HF_SUBDIR, config, texts)
    vocab = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return StageOutput(stats={"texts": len(texts), "text_tokens": len(vocab), "vocab_size": config.vocab_size})


STAGE = Stage("embedded_model", VERSION, _run, on_disk=True)
