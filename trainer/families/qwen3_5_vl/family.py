"""Qwen3.5 without torch: the keys of its config.json, its sizes, and the family in one object.

Qwen3.5 computes what Qwen3-VL computes (`trainer/families/qwen3_vl/model.py` tells the forward pass), except that

- most layers mix tokens by a gated delta net (`trainer/parts/delta/module.py`), every fourth by attention with a gate
  for each head's output (`GatedSelfAttention` in `trainer/parts/attention/module.py`);
- only the first components of a head are rotated (`partial_rotary_factor`), and norms multiply by 1 + weight;
- the vision encoder has no deepstack levels;
- there may be a layer of multi-token prediction (`trainer/layers/decoder.py`), which runs only if a training trains it.

So it needs no model and no table of weights of its own. Defaults of keys are transformers' (5.23).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dataset_builders.errors import InputError
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.families.config_keys import attention_of, decoder_shape, mlp_of, read_keys, rotary_of
from trainer.families.qwen3_5_vl.variants import VARIANTS, embedded_configs
from trainer.families.qwen3_vl import family as qwen3_vl
from trainer.model.layer import FeedForward, Layer, MultiTokenPrediction
from trainer.model.shape import ModelShape
from trainer.parts.attention.part import WithPartialRotation
from trainer.parts.delta.part import DeltaNet, WithDelta

DELTA, ATTENTION = "linear_attention", "full_attention"


class TextRotaryKeys(qwen3_vl.TextRotaryKeys):
    """The keys of rope_parameters in text_config."""

    mrope_section: list[NonNegativeInt] = Field(default=[11, 11, 10], min_length=3, max_length=3)
    partial_rotary_factor: float = Field(default=None, gt=0, le=1)  # missing: text_config's own key


class HybridKeys(qwen3_vl.MropeKeys):
    """The keys of text_config, without those of the feed-forward layers."""

    vocab_size: PositiveInt = 248_320
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 4
    head_dim: int = Field(default=256, ge=2, multiple_of=2)
    hidden_act: Literal["silu"] = "silu"
    rope_parameters: TextRotaryKeys | None = None
    rope_scaling: TextRotaryKeys | None = None
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    full_attention_interval: PositiveInt = 4
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["swish"] = "swish"
    linear_conv_kernel_dim: Literal[4] = 4  # `DeltaNet.taps`
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
    # The share of a head that is rotated stands in the rotary settings, or beside them.
    rotary_dim = int(text.head_dim * (rotary.partial_rotary_factor or text.partial_rotary_factor))
    mixers = {ATTENTION: attention_of(text, where, gated=True), DELTA: _delta_net(text, path)}
    layers, interval, types = text.num_hidden_layers, text.full_attention_interval, text.layer_types
    if types is None:
        types = [DELTA if (number + 1) % interval else ATTENTION for number in range(layers)]
    elif len(types) != layers:
        raise InputError(
            f"{path}: text_config.layer_types has {len(types)} layers, num_hidden_layers is {layers}; take "
            "a complete qwen3_5 model"
        )
    language = decoder_shape(
        text,
        where,
        layers=tuple(Layer(text.hidden_size, mixers[kind], feed_forward) for kind in types),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        mrope_section=qwen3_vl.checked_section(rotary.mrope_section, rotary_dim, path),
        tie_word_embeddings=keys.tie_word_embeddings,
        zero_centred_norms=True,  # transformers' RMSNorm of this model multiplies by 1 + weight
    )
    shape = qwen3_vl.with_vision(language, keys, path)
    if text.mtp_num_hidden_layers != 1 or text.mtp_use_dedicated_embeddings:
        return shape  # its tensors are copied to an export, but cannot be trained
    # The layer of multi-token prediction has attention, whatever the layers before it have.
    mtp = MultiTokenPrediction(Layer(text.hidden_size, mixers[ATTENTION], feed_forward))
    return dataclasses.replace(shape, mtp=mtp)


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
    )


def check_settings(train: TrainConfig, parallel: ParallelConfig) -> None:
    """Check that delta layers support the settings of a training."""
    if train.precision == "float8":
        raise InputError(
            "train.precision is float8, in which the delta layers of a qwen3_5 model have not been tried; set "
            "train.precision=bfloat16"
        )


# Images, tokens and parts are the same as in Qwen3-VL; deepstack is absent.
FAMILY = dataclasses.replace(
    qwen3_vl.FAMILY,
    model_type="qwen3_5",
    read_shape=read_shape,
    reference="transformers:Qwen3_5ForConditionalGeneration",
    check_settings=check_settings,
    copied=("mtp.",),  # multi-token prediction, used for speculative decoding; a training may train it
    embedded=embedded_configs,
    sizes=(WithPartialRotation, WithDelta),
    variants=VARIANTS,
)
