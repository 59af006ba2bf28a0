"""embedded_model: a model with random weights, as a complete directory made from a seed; tiny in the embedded recipe.

    hf/config.json  generation_config.json  model.safetensors
    hf/preprocessor_config.json  video_preprocessor_config.json
    hf/tokenizer.json  tokenizer_config.json  chat_template.jinja

It has every part of a real model of its family, Qwen's special tokens and ChatML, so that later stages treat it like a
directory from the hub. Its tokenizer is trained on the texts of the train split.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from dataset_builders.contracts.sample import IMAGE_SLOT, from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.storage.files import write_json, write_text
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.chat_format.boxes import with_boxes_written
from stages.shared.chat_format.config import BoxFormat
from stages.shared.inputs.config import EmbeddedModelConfig
from stages.shared.inputs.load_transformers import no_progress_bar
from trainer.contract.names import HF_EXPORT
from trainer.model.registry import get_family

VERSION = 3  # 2: the tokenizer is trained on the samples of convert, whatever their source; 3: reads videos

# Qwen3's added tokens in Qwen3's order. As in Qwen3, a decoder that drops special tokens keeps the text tokens.
_CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
_CONTROL_TOKENS += ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"]
_CONTROL_TOKENS += ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
_TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# The split of Qwen2 and later before byte-level BPE: one digit per token, words with their leading space.
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
            {%- elif part.type == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- raise_exception('a message part must be a text, an image or a video, not ' ~ part.type) -}}
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


def _run(config: EmbeddedModelConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    texts = list(_texts(inputs["samples"]))
    directory = make_tiny_hf_dir(work / HF_EXPORT, config, texts)
    vocab = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return StageOutput(stats={"texts": len(texts), "text_tokens": len(vocab), "vocab_size": config.vocab_size})


def _texts(samples: Artifact) -> Iterator[str]:
    """Yield all texts to train on: questions, answers and reasoning of the train split, without image slots.

    Boxes are written in the default form, since the recipe's is not known here; in another one, they are only longer.
    """
    for shard in (shard for shard in samples.manifest.shards if shard.split == "train"):
        for key, fields in iter_records(samples.dir / shard.name, shard):
            for message in with_boxes_written(from_fields(key, fields), BoxFormat(), None).messages:
                yield message.text.replace(IMAGE_SLOT, "")
                yield from filter(None, [message.reasoning])


def make_tiny_hf_dir(directory: Path, config: EmbeddedModelConfig, texts: list[str]) -> Path:
    """Write a complete directory, and return it; the same arguments give the same bytes in any process."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, config)
    ids = {token: tokenizer.token_to_id(token) for token in _CONTROL_TOKENS}
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
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
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_text(directory / "chat_template.jinja", _CHAT_TEMPLATE)
    configs = config.hf_configs(ids)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        write_json(directory / name, configs[name])
    model_class = resolve_name(get_family(config.family).reference)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # Drawn in float32: in bfloat16 it takes twice as long, and one A_log in 256 would be the logarithm of zero.
        model = model_class(transformers.AutoConfig.for_model(**configs["config.json"])).to(
            getattr(torch, config.dtype)
        )
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=False,
    )
    with no_progress_bar():
        model.save_pretrained(directory)
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
        # Given to the trainer, the added tokens get the first ids; added afterwards, they get the last ones.
        special_tokens=added[::-1] if first else [],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


STAGE = Stage("embedded_model", VERSION, _run, on_disk=True, digested=(f"{HF_EXPORT}/*",))
