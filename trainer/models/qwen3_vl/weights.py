"""HF safetensors <-> our parameters: one table of names, used in both directions.

megatron-core keeps queries, keys and values of a group of heads together in one matrix, and gate and up of a gated
MLP one after the other; HF keeps them apart. Every other tensor is the same in both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.models.qwen3_vl.config import Qwen3VLSizes

Kind = Literal["copy", "qkv", "vision_qkv", "glu"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of ours, the HF tensors it is made of, and how."""

    ours: str
    hf: tuple[str, ...]
    kind: Kind = "copy"


def rules(sizes: Qwen3VLSizes) -> Iterator[Rule]:
    """The whole table, layers numbered over the whole model; HF's order of tensors."""
    yield Rule("language.embedding.weight", ("model.language_model.embed_tokens.weight",))
    for i in range(sizes.language.num_layers):
        yield from _language_layer(f"language.decoder.layers.{i}.", f"model.language_model.layers.{i}.", sizes)
    yield Rule("language.decoder.final_layernorm.weight", ("model.language_model.norm.weight",))
    if not sizes.language.tied_embeddings:
        yield Rule("language.output_layer.weight", ("lm_head.weight",))
    yield from _vision(sizes)


def _language_layer(ours: str, hf: str, sizes: Qwen3VLSizes) -> Iterator[Rule]:
    yield Rule(ours + "input_layernorm.weight", (hf + "input_layernorm.weight",))
    for what in ("weight", "bias") if sizes.language.attention_bias else ("weight",):
        parts = tuple(f"{hf}self_attn.{x}_proj.{what}" for x in "qkv")
        yield Rule(f"{ours}self_attention.linear_qkv.{what}", parts, "qkv")
    yield Rule(ours + "self_attention.q_layernorm.weight", (hf + "self_attn.q_norm.weight",))
    yield Rule(ours + "self_attention.k_layernorm.weight", (hf + "self_attn.k_norm.weight",))
    yield Rule(ours + "self_attention.linear_proj.weight", (hf + "self_attn.o_proj.weight",))
    yield Rule(ours + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",))
    yield Rule(ours + "mlp.linear_fc1.weight", (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"), "glu")
    yield Rule(ours + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",))


def _vision(sizes: Qwen3VLSizes) -> Iterator[Rule]:
    hf = "model.visual."
    yield Rule("vision.pos_embed", (hf + "pos_embed.weight",))
    for what in ("weight", "bias"):
        yield Rule(f"vision.patch_embed.{what}", (f"{hf}patch_embed.proj.{what}",))
        for i in range(sizes.vision.num_layers):
            layer, block = f"vision.blocks.layers.{i}.", f"{hf}blocks.{i}."
            yield Rule(f"{layer}input_layernorm.{what}", (f"{block}norm1.{what}",))
            yield Rule(f"{layer}self_attention.linear_qkv.{what}", (f"{block}attn.qkv.{what}",), "vision_qkv")
            yield Rule(f"{layer}self_attention.linear_proj.{what}", (f"{block}attn.proj.{what}",))
            yield Rule(f"{layer}pre_mlp_layernorm.{what}", (f"{block}norm2.{what}",))
            yield Rule(f"{layer}mlp.linear_fc1.{what}", (f"{block}mlp.linear_fc1.{what}",))
            yield Rule(f"{layer}mlp.linear_fc2.{what}", (f"{block}mlp.linear_fc2.{what}",))
        mergers = [("vision.merger.", f"{hf}merger.")]
        for i in range(len(sizes.vision.deepstack_layers)):
            mergers.append((f"vision.deepstack_mergers.{i}.", f"{hf}deepstack_merger_list.{i}."))
        for merger, source in mergers:
            for part in ("norm", "linear_fc1", "linear_fc2"):
                yield Rule(f"{merger}{part}.{what}", (f"{source}{part}.{what}",))


def blocks(rule: Rule) -> int:
    """Equal runs of rows in the HF tensor, each of which tensor-parallel ranks divide among themselves: queries, keys
    and values one after the other, or one run."""
    return 3 if rule.kind == "vision_qkv" else 1


def fuse(rule: Rule, parts: list[torch.Tensor], sizes: Qwen3VLSizes, tp: int = 1) -> torch.Tensor:
    """HF tensors -> our parameter; or a rank's slices of them -> its slice, one of `tp`."""
    if rule.kind == "qkv":
        groups = sizes.language.num_query_groups // tp
        return torch.cat([p.unflatten(0, (groups, -1)) for p in parts], dim=1).flatten(0, 1)
    if rule.kind == "vision_qkv":
        return parts[0].unflatten(0, (3, sizes.vision.num_heads // tp, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat(parts)


def split(rule: Rule, ours: torch.Tensor, sizes: Qwen3VLSizes, tp: int = 1) -> list[torch.Tensor]:
    """Our parameter, or a rank's slice of it -> HF tensors, or slices of them; the inverse of `fuse`."""
    if rule.kind == "qkv":
        language = sizes.language
        queries = language.num_heads // language.num_query_groups * language.head_dim
        parts = ours.unflatten(0, (language.num_query_groups // tp, -1)).split(
            [queries, language.head_dim, language.head_dim], dim=1
        )
        return [p.flatten(0, 1) for p in parts]
    if rule.kind == "vision_qkv":
        return [ours.unflatten(0, (sizes.vision.num_heads // tp, 3, -1)).transpose(0, 1).flatten(0, 2)]
    return list(ours.chunk(len(rule.hf)))
