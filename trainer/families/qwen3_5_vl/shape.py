"""The sizes of a Qwen3.5 model, read from its config.json without torch. Defaults are transformers' (5.23)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dataset_builders.errors import InputError
from trainer.families.config_keys import BackboneKeys, attention_of, decoder_sizes, mlp_of, read_keys, rotary_of
from trainer.families.qwen3_vl import shape as qwen3_vl
from trainer.model.layer import FeedForward, Layer
from trainer.model.mtp import MultiTokenPrediction
from trainer.model.shape import DecoderShape, ModelShape
from trainer.parts.delta.part import DeltaNet

DELTA, ATTENTION = "linear_attention", "full_attention"


class TextRotaryKeys(qwen3_vl.TextRotaryKeys):
    """The keys of rope_parameters in text_config."""

    mrope_section: list[NonNegativeInt] = Field(default=[11, 11, 10], min_length=3, max_length=3)
    partial_rotary_factor: float = Field(default=None, gt=0, le=1)  # missing: text_config's own key


class HybridKeys(BackboneKeys):
    """The keys of text_config, without those of the feed-forward layers."""

    vocab_size: PositiveInt = 248_320
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 4
    head_dim: int = Field(default=256, ge=2, multiple_of=2)
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False  # transformers reads only the key of the whole model, never this one
    rope_parameters: TextRotaryKeys | None = None
    rope_scaling: TextRotaryKeys | None = None
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    full_attention_interval: PositiveInt = 4
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["swish"] = "swish"
    linear_conv_kernel_dim: Literal[4] = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    mamba_ssm_dtype: Literal["float32"] = "float32"
    mlp_only_layers: list[int] = Field(default=[], max_length=0)
    # The layer of multi-token prediction can be trained if there is one, with the model's own embeddings.
    mtp_num_hidden_layers: Any = None
    mtp_use_dedicated_embeddings: Any = None


class TextKeys(HybridKeys):
    """The keys of text_config."""

    model_type: Literal["qwen3_5_text"] = "qwen3_5_text"
    intermediate_size: PositiveInt = 12_288


class VisionKeys(qwen3_vl.VisionKeys):
    """The keys of vision_config."""

    model_type: Literal["qwen3_5_vision", "qwen3_5"] = "qwen3_5_vision"
    deepstack_visual_indexes: list[int] = Field(default=[], max_length=0)


class Qwen35VLKeys(qwen3_vl.Qwen3VLKeys):
    """The keys of config.json."""

    model_type: Literal["qwen3_5"]
    text_config: TextKeys
    vision_config: VisionKeys
    language_model_only: Literal[False] = False


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return the sizes in a parsed config.json."""
    keys = read_keys(Qwen35VLKeys, config, path)
    return shape_with(keys, mlp_of(keys.text_config), path)


def shape_with(keys: Qwen35VLKeys, feed_forward: FeedForward, path: Path | str) -> ModelShape:
    """Return the shape of a model whose layers all have this feed-forward part."""
    text, where = keys.text_config, f"{path}: text_config."
    rotary, theta = rotary_of(text, TextRotaryKeys(), default_theta=10_000.0)
    rotary_dim = int(text.head_dim * (rotary.partial_rotary_factor or text.partial_rotary_factor))
    sizes, types = decoder_sizes(text, where), _layer_types(text, path)
    mixers = {ATTENTION: attention_of(text, where, gated=True), DELTA: _delta_net(text, path)}
    language = DecoderShape(
        **sizes,
        layers=tuple(Layer(text.hidden_size, mixers[kind], feed_forward) for kind in types),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        mrope_section=qwen3_vl.checked_section(rotary.mrope_section, rotary_dim, path),
        tie_word_embeddings=keys.tie_word_embeddings,
        zero_centred_norms=True,  # transformers' RMSNorm of this model multiplies by 1 + weight
    )
    has_mtp = text.mtp_num_hidden_layers == 1 and not text.mtp_use_dedicated_embeddings
    drafts = Layer(text.hidden_size, mixers[ATTENTION], feed_forward)
    shape = qwen3_vl.with_vision(language, keys, path)
    return dataclasses.replace(shape, mtp=MultiTokenPrediction(drafts) if has_mtp else None)


def _layer_types(keys: HybridKeys, path: Path | str) -> tuple[str, ...]:
    layers, interval = keys.num_hidden_layers, keys.full_attention_interval
    if keys.layer_types is None:
        return tuple(DELTA if (number + 1) % interval else ATTENTION for number in range(layers))
    if len(keys.layer_types) != layers:
        raise InputError(
            f"{path}: text_config.layer_types has {len(keys.layer_types)} layers, num_hidden_layers is {layers}; take "
            "a complete qwen3_5 model"
        )
    return tuple(keys.layer_types)


def _delta_net(keys: HybridKeys, path: Path | str) -> DeltaNet:
    key_heads, value_heads = keys.linear_num_key_heads, keys.linear_num_value_heads
    if value_heads % key_heads:
        raise InputError(
            f"{path}: text_config.linear_num_key_heads is {key_heads}, which does not divide linear_num_value_heads="
            f"{value_heads}; take a complete qwen3_5 model"
        )
    if keys.linear_key_head_dim != keys.linear_value_head_dim:
        raise InputError(
            f"{path}: text_config.linear_key_head_dim is {keys.linear_key_head_dim}, linear_value_head_dim "
            f"{keys.linear_value_head_dim}; only equal ones are understood"
        )
    return DeltaNet(
        hidden_size=keys.hidden_size,
        key_heads=key_heads,
        value_heads=value_heads,
        head_dim=keys.linear_key_head_dim,
        taps=keys.linear_conv_kernel_dim,
    )
