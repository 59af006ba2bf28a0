"""config.json of a Qwen3-VL directory -> our sizes -> megatron-core's TransformerConfig, for both halves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from dataset_builders.contracts.errors import InputError
from trainer.batch import Geometry
from trainer.contract import ParallelConfig

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageSizes:
    """The language model: `text_config` of config.json."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    activation: str
    attention_bias: bool
    tied_embeddings: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSizes:
    """The vision encoder: `vision_config` of config.json."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_positions: int
    deepstack_layers: tuple[int, ...]
    rope_theta: float
    activation: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLSizes:
    """A whole Qwen3-VL."""

    language: LanguageSizes
    vision: VisionSizes
    image_token_id: int

    @property
    def geometry(self) -> Geometry:
        """What a micro batch must know."""
        v = self.vision
        return Geometry(self.image_token_id, v.spatial_merge_size, int(v.num_positions**0.5), 3 * v.patch_size**2)


def read_config(hf_dir: Path) -> Qwen3VLSizes:
    """Sizes from `hf_dir/config.json`.

    Raises:
        InputError: a field is missing, or asks for something this model does not do.
    """
    path = hf_dir / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    try:
        return Qwen3VLSizes(
            language=_language(raw["text_config"], raw, path),
            vision=_vision(raw["vision_config"]),
            image_token_id=raw["image_token_id"],
        )
    except KeyError as error:
        raise InputError(f"{path}: the field {error} is missing; is it a complete qwen3_vl config?") from error


def _language(text: Mapping[str, Any], raw: Mapping[str, Any], path: Path) -> LanguageSizes:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = tuple(rope.get("mrope_section", (24, 20, 20)))
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if sum(section) != head_dim // 2:
        raise InputError(f"{path}: mrope_section {section} must sum to half of head_dim={head_dim}")
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"{path}: rope_type {rope['rope_type']!r} is not supported, only 'default'")
    return LanguageSizes(
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        ffn_hidden_size=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"],
        head_dim=head_dim,
        vocab_size=text["vocab_size"],
        norm_eps=text["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", text.get("rope_theta", 5_000_000.0)),
        mrope_section=section,
        activation=text["hidden_act"],
        attention_bias=text.get("attention_bias", False),
        tied_embeddings=raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
    )


def _vision(vision: Mapping[str, Any]) -> VisionSizes:
    return VisionSizes(
        num_layers=vision["depth"],
        hidden_size=vision["hidden_size"],
        ffn_hidden_size=vision["intermediate_size"],
        num_heads=vision["num_heads"],
        out_hidden_size=vision["out_hidden_size"],
        patch_size=vision["patch_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        spatial_merge_size=vision["spatial_merge_size"],
        num_positions=vision["num_position_embeddings"],
        deepstack_layers=tuple(vision["deepstack_visual_indexes"]),
        rope_theta=(vision.get("rope_parameters") or {}).get("rope_theta", 10_000.0),
        activation=vision["hidden_act"],
    )


def language_config(sizes: LanguageSizes, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config of the language model."""
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_query_groups,
        kv_channels=sizes.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        # megatron-core's name for: the module set's own gate. Other gates are computed step by step.
        use_te_activation_func=sizes.activation == "silu",
        activation_func=_ACTIVATIONS[sizes.activation],
        add_bias_linear=False,
        add_qkv_bias=sizes.attention_bias,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # With virtual stages two pipeline ranks exchange activations and gradients at once; in one batch they would be
        # matched by their order and taken for each other.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        num_layers_in_first_pipeline_stage=parallel.first_pipeline_layers,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        # Whole layers are recomputed by the block, which knows deepstack; megatron-core's flag is for the cores alone.
        recompute_granularity="selective" if parallel.recompute == "selective" else None,
        **_common(dtype),
    )


def vision_config(sizes: VisionSizes, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config of the vision encoder: all its layers on the first pipeline rank, never cut along the
    sequence, each matrix whole unless `vision_split` says otherwise."""
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_attention_heads=sizes.num_heads,
        kv_channels=sizes.head_dim,
        normalization="LayerNorm",
        layernorm_epsilon=1e-6,
        activation_func=_ACTIVATIONS[sizes.activation],
        add_bias_linear=True,
        tensor_model_parallel_size=parallel.tp if parallel.vision_split == "tensor_parallel" else 1,
        **_common(dtype),
    )


def _common(dtype: torch.dtype) -> dict[str, Any]:
    """What is the same for both halves. Fusions that need CUDA stay off: Transformer Engine brings its own."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "batch_p2p_sync": False,
    }
