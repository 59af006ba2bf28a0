"""HF safetensors <-> our parameters: how one row of a family's table of weights is computed, in both directions.

megatron-core keeps queries, keys and values of a group of heads together in one matrix, and gate and up of a gated
MLP one after the other; HF keeps them apart. A family that does otherwise defines a packing of its own.

Importing this file does not load torch: a recipe's check reads the table alone.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.model.late_import import load

Tensor = Any  # torch's


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return load("torch:cat")(tuple(parts), dim)


# Transformer Engine keeps a norm and the linear layer after it in one module.
_FUSED_NORM = re.compile(r"(self_attention|mlp)\.\w+\.layer_norm_")
_NORMS = {"self_attention": "input_layernorm.", "mlp": "pre_mlp_layernorm."}


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
        role: name by which `train.adapter.targets` selects the layer; empty for weights without `sizes`.
        axis: of a linear layer's weight, the axis that tensor-parallel ranks divide: 0, its outputs, or 1, its inputs.
    """

    ours: str
    hf: tuple[str, ...]
    packing: Stacked = STACKED
    sizes: tuple[tuple[int, int], ...] = ()
    role: str = ""
    axis: int = 0


def global_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under the name of the table: layers numbered over all pipeline ranks, norms apart."""
    decoder = "language.decoder.layers."
    for name, param in model.named_parameters():
        if name.startswith(decoder):
            local, rest = name.removeprefix(decoder).split(".", 1)
            name = f"{decoder}{model.language.decoder.layers[int(local)].layer_number - 1}.{rest}"
        yield _FUSED_NORM.sub(lambda found: _NORMS[found[1]], name), param
