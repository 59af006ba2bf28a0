"""HF safetensors <-> our parameters: how one row of a family's table of weights is computed, in both directions.

megatron-core keeps queries, keys and values of a group of heads together in one matrix, and gate and up of a gated
MLP one after the other; HF keeps them apart. A family that does otherwise defines a packing of its own.

Importing this file does not load torch: a recipe's check reads the table alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.model.family import load
from trainer.model.shape import DecoderShape

Tensor = Any  # torch's


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return load("torch:cat")(tuple(parts), dim)


# Transformer Engine keeps a norm and the linear after it in one module.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True, slots=True)
class Stacked:
    """The HF tensors one after the other along their first axis, all of the same size; a single one is copied."""

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        """Of each of `count` HF tensors the relative lengths of its runs of rows; tensor-parallel ranks divide each
        run."""
        return [(1,)] * count

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        """HF tensors -> our parameter; or a rank's slices of them -> its slice, one of `tp`."""
        return _cat(parts)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        """Our parameter, or a rank's slice of it -> `count` HF tensors, or slices of them."""
        return list(ours.chunk(count))


STACKED = Stacked()


@dataclass(frozen=True, slots=True)
class StackedRuns(Stacked):
    """The HF tensors one after the other along their first axis. A rank's parts of all runs follow each other in ours.

    Attributes:
        rows: of each HF tensor the lengths of its runs.
    """

    rows: tuple[tuple[int, ...], ...]

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        return self.rows

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return list(ours.split([sum(rows) // tp for rows in self.rows]))


@dataclass(frozen=True, slots=True)
class GroupedQKV(Stacked):
    """HF's queries, keys and values apart; ours by groups of heads.

    Attributes:
        groups: key-value heads.
        widths: rows of a group's queries, of its key and of its value.
    """

    groups: int = 1
    widths: tuple[int, int, int] = (1, 1, 1)

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        return _cat([part.unflatten(0, (self.groups // tp, -1)) for part in parts], dim=1).flatten(0, 1)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        parts = ours.unflatten(0, (self.groups // tp, -1)).split(list(self.widths), dim=1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True, slots=True)
class GatedGroupedQKV(GroupedQKV):
    """HF's queries have the gate of each head behind it; ours have the gates of a group behind its queries.

    Attributes:
        widths: the first is the rows of a group's queries and gates.
        head_dim: rows of a head's query, and of its gate.
    """

    head_dim: int = 1

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        by_head = parts[0].unflatten(0, (self.groups // tp, -1, 2, self.head_dim))
        return GroupedQKV.fuse(self, [by_head.transpose(1, 2).flatten(0, 3), *parts[1:]], tp)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        queries, *others = GroupedQKV.split(self, ours, count, tp)
        by_group = queries.unflatten(0, (self.groups // tp, 2, -1, self.head_dim))
        return [by_group.transpose(1, 2).flatten(0, 3), *others]


@dataclass(frozen=True, slots=True)
class JointQKV(Stacked):
    """HF's queries of all heads, then their keys, then their values, in one tensor; ours head by head."""

    heads: int = 1

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        return [(1, 1, 1)]

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        return parts[0].unflatten(0, (3, self.heads // tp, -1)).transpose(0, 1).flatten(0, 2)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return [ours.unflatten(0, (self.heads // tp, 3, -1)).transpose(0, 1).flatten(0, 2)]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of ours, its layer counted over the whole model; its HF tensors, and how they are packed.

    Attributes:
        sizes: (out, in) of each HF tensor, if it is the weight of a linear layer that can have adapters.
    """

    ours: str
    hf: tuple[str, ...]
    packing: Stacked = STACKED
    sizes: tuple[tuple[int, int], ...] = ()


# (sizes, number of the layer, beginning of our names, beginning of HF's names) -> the rules of what stands in the place
# of attention
AttentionRules = Callable[[DecoderShape, int, str, str], Iterator[Rule]]


def attention_rules(shape: DecoderShape, number: int, ours: str, hf: str) -> Iterator[Rule]:
    """Attention with norms of queries and keys, in every layer; with gates if the shape says so."""
    group = shape.num_heads // shape.num_kv_heads * shape.head_dim
    width, heads, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    queries = 2 * heads if shape.gated_attention else heads
    qkv = GroupedQKV(groups=shape.num_kv_heads, widths=(group, shape.head_dim, shape.head_dim))
    if shape.gated_attention:
        widths = (2 * group, shape.head_dim, shape.head_dim)
        qkv = GatedGroupedQKV(groups=shape.num_kv_heads, widths=widths, head_dim=shape.head_dim)
    yield Rule(
        ours + "self_attention.linear_qkv.weight",
        tuple(f"{hf}self_attn.{name}_proj.weight" for name in "qkv"),
        qkv,
        sizes=((queries, width), (keys, width), (keys, width)),
    )
    yield Rule(ours + "self_attention.q_layernorm.weight", (hf + "self_attn.q_norm.weight",))
    yield Rule(ours + "self_attention.k_layernorm.weight", (hf + "self_attn.k_norm.weight",))
    output = (hf + "self_attn.o_proj.weight",)
    yield Rule(ours + "self_attention.linear_proj.weight", output, sizes=((width, heads),))


def decoder_rules(shape: DecoderShape, hf: str, attention: AttentionRules = attention_rules) -> Iterator[Rule]:
    """The rules of a decoder of Qwen's, in HF's order: layers with a gated MLP, norms before both halves.

    Args:
        hf: the beginning of HF's names: "model.".
        attention: the rules of a layer's first half.
    """
    width, inner = shape.hidden_size, shape.intermediate_size
    yield Rule("language.embedding.weight", (f"{hf}embed_tokens.weight",))
    for number in range(shape.num_layers):
        ours, theirs = f"language.decoder.layers.{number}.", f"{hf}layers.{number}."
        yield Rule(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",))
        yield from attention(shape, number, ours, theirs)
        yield Rule(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",))
        gate_and_up = (theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
        yield Rule(ours + "mlp.linear_fc1.weight", gate_and_up, sizes=((inner, width), (inner, width)))
        yield Rule(ours + "mlp.linear_fc2.weight", (theirs + "mlp.down_proj.weight",), sizes=((width, inner),))
    yield Rule("language.decoder.final_layernorm.weight", (f"{hf}norm.weight",))
    if not shape.tie_word_embeddings:
        yield Rule("language.output_layer.weight", ("lm_head.weight",))


def global_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under the name of the table: layers numbered over all pipeline ranks, norms apart."""
    decoder = "language.decoder.layers."
    for name, param in model.named_parameters():
        if name.startswith(decoder):
            local, rest = name.removeprefix(decoder).split(".", 1)
            name = f"{decoder}{model.language.decoder.layers[int(local)].layer_number - 1}.{rest}"
        for fused, apart in _FUSED_NORMS:
            name = name.replace(fused, apart)
        yield name, param
