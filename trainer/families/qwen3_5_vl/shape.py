"""config.json of a Qwen3.5 directory -> its sizes. Without torch. Defaults are transformers' (5.23)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dataset_builders.errors import InputError
from trainer.families.qwen3_vl import shape as qwen3_vl
from trainer.model.config_keys import DecoderKeys, decoder_sizes, read_keys, rotary_of
from trainer.model.shape import DELTA_CHUNK, DecoderShape, ModelShape

DELTA, ATTENTION = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridDecoderShape(DecoderShape):
    """A decoder whose layers are gated delta nets or gated attention.

    Attributes:
        layer_types: of each layer, in transformers' words.
        turned: the position turns so many numbers of an attention head, the first ones.
        delta_key_heads, delta_value_heads: of a delta layer; each key head serves equally many value heads.
        delta_head_dim: of queries, keys and values of a delta layer.
        taps: of its convolution.
    """

    layer_types: tuple[str, ...]
    turned: int
    delta_key_heads: int
    delta_value_heads: int
    delta_head_dim: int
    taps: int

    @property
    def rotary_dim(self) -> int:
        return self.turned

    @property
    def in_chunks(self) -> bool:
        return DELTA in self.layer_types

    def is_delta(self, number: int) -> bool:
        """Whether a layer, counted from 0, is a gated delta net."""
        return self.layer_types[number] == DELTA

    @property
    def delta_channels(self) -> tuple[int, int, int]:
        """Numbers of the queries, keys and values of a token in a delta layer."""
        key, value = self.delta_key_heads * self.delta_head_dim, self.delta_value_heads * self.delta_head_dim
        return key, key, value

    def divided_widths(self) -> dict[str, int]:
        return DecoderShape.divided_widths(self) | self.context_divided_widths()

    def context_divided_widths(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.delta_key_heads} if DELTA in self.layer_types else {}

    def layer_parameters(self, number: int) -> int:
        whole = DecoderShape.layer_parameters(self, number)
        if not self.is_delta(number):
            return whole
        attention = self._projections() + self._output_projection() + 2 * self.head_dim
        own = self.taps * sum(self.delta_channels) + 2 * self.delta_value_heads + self.delta_head_dim
        return whole - attention + self._delta_projections() + self._delta_output() + own

    def kept_numbers(self, number: int, *, selective: bool) -> int:
        """Of a delta layer exactly what its kernels save: the projected [q | k | v | z | b | a] and the input of the
        output projection; unless they are computed again also q, k and v after the convolution, what the rule gives to
        the norm, and decay and beta in float32, here two numbers each."""
        if not self.is_delta(number):
            return DecoderShape.kept_numbers(self, number, selective=selective)
        queries, keys, values = self.delta_channels
        inside = queries + keys + values + values + 4 * self.delta_value_heads
        return queries + keys + 3 * values + 2 * self.delta_value_heads + (0 if selective else inside)

    def layer_flops(self, number: int) -> tuple[int, int, int]:
        """The delta rule counts before: a state needs every token. Per token and value head it is three products
        inside a chunk of C tokens (6 C d), the solution of a triangular system (2 C d), and three products with the
        state (6 d^2); nothing grows with the length of a sample."""
        before, after, squared = DecoderShape.layer_flops(self, number)
        if not self.is_delta(number):
            return before, after, squared
        width = self.delta_head_dim
        rule = self.delta_value_heads * (8 * DELTA_CHUNK * width + 6 * width**2)
        convolution = 2 * self.taps * sum(self.delta_channels)
        after += 2 * (self._delta_output() - self._output_projection())
        return 2 * self._delta_projections() + convolution + rule, after, 0

    def _delta_projections(self) -> int:
        return self.hidden_size * (sum(self.delta_channels) + self.delta_channels[-1] + 2 * self.delta_value_heads)

    def _delta_output(self) -> int:
        return self.hidden_size * self.delta_channels[-1]


class TextRotaryKeys(qwen3_vl.TextRotaryKeys):
    """rope_parameters of text_config."""

    mrope_section: list[NonNegativeInt] = Field(default=[11, 11, 10], min_length=3, max_length=3)
    partial_rotary_factor: float = Field(default=None, gt=0, le=1)  # missing: the key beside it


class TextKeys(DecoderKeys):
    """text_config. The keys of the layer that predicts a second token are for servers: it is not computed here."""

    model_type: Literal["qwen3_5_text"] = "qwen3_5_text"
    vocab_size: PositiveInt = 248_320
    intermediate_size: PositiveInt = 12_288
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 4
    head_dim: int = Field(default=256, ge=2, multiple_of=2)
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False  # transformers ties by the key of the whole model and never looks at this one
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
    mtp_num_hidden_layers: Any = None
    mtp_use_dedicated_embeddings: Any = None


class VisionKeys(qwen3_vl.VisionKeys):
    """vision_config."""

    model_type: Literal["qwen3_5_vision", "qwen3_5"] = "qwen3_5_vision"
    deepstack_visual_indexes: list[int] = Field(default=[], max_length=0)


class Qwen35VLKeys(qwen3_vl.Qwen3VLKeys):
    """config.json."""

    model_type: Literal["qwen3_5"]
    text_config: TextKeys
    vision_config: VisionKeys
    language_model_only: Literal[False] = False


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """The sizes of a parsed config.json.

    Args:
        path: of the file, for messages.

    Raises:
        InputError: a key is not understood, or two do not go together.
    """
    keys = read_keys(Qwen35VLKeys, config, path)
    text = keys.text_config
    sizes = decoder_sizes(text, f"{path}: text_config.")
    rotary, theta = rotary_of(text, TextRotaryKeys(), default_theta=10_000.0)
    turned = int(text.head_dim * (rotary.partial_rotary_factor or text.partial_rotary_factor))
    language = HybridDecoderShape(
        **sizes,
        rope_theta=theta,
        mrope_section=qwen3_vl.checked_section(rotary.mrope_section, turned, path),
        tie_word_embeddings=keys.tie_word_embeddings,
        zero_centred_norms=True,
        gated_attention=True,
        layer_types=_layer_types(text, path),
        turned=turned,
        delta_key_heads=text.linear_num_key_heads,
        delta_value_heads=text.linear_num_value_heads,
        delta_head_dim=_delta_head_dim(text, path),
        taps=text.linear_conv_kernel_dim,
    )
    return qwen3_vl.with_vision(language, keys, path)


def _layer_types(keys: TextKeys, path: Path | str) -> tuple[str, ...]:
    layers, interval = keys.num_hidden_layers, keys.full_attention_interval
    if keys.layer_types is None:
        return tuple(DELTA if (number + 1) % interval else ATTENTION for number in range(layers))
    if len(keys.layer_types) != layers:
        raise InputError(
            f"{path}: text_config.layer_types has {len(keys.layer_types)} layers, num_hidden_layers is {layers}; take "
            "a complete qwen3_5 model"
        )
    return tuple(keys.layer_types)


def _delta_head_dim(keys: TextKeys, path: Path | str) -> int:
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
    return keys.linear_key_head_dim
