"""The conversion between HF safetensors and our parameters: a row of a family's table of weights, and its packing.

A `Rule` names one parameter of ours and its HF tensors. Its packing says how rows (or matrices) of the HF tensors lie
in ours: megatron-core keeps queries, keys and values of a group of heads together in one matrix, and concatenates gate
and up of a gated MLP, where HF has separate tensors. `fuse` reads HF's form, `split` writes it; both also work on the
slices of one of `tp` ranks, of which ours is then the rank's slice. A family with another layout defines its own
packing.

Importing this file does not load torch: a recipe's check reads only the table.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Tensor = Any  # torch's
LAYERS = "language.decoder.layers."  # begins our name of a parameter of a language layer; the layer's index follows


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch  # here, so that the check of a recipe reads the table without it

    return torch.cat(tuple(parts), dim)


@dataclass(frozen=True, slots=True)
class Stacked:
    """The packing that concatenates HF tensors of equal size along the first axis; a single tensor is copied."""

    # whether each rank has whole HF tensors, a share of their names, instead of slices of all of them
    divides_names: ClassVar[bool] = False
    # whether a rank's part of ours is no slice of the HF tensors, so that each rank reads them whole
    mixes_ranks: ClassVar[bool] = False

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        """Return the relative lengths of the runs of rows of each of `count` HF tensors; tensor-parallel ranks divide
        each run."""
        return [(1,)] * count

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        """Convert HF tensors to our parameter, or a rank's slices of HF tensors to its slice, one of `tp`."""
        return _cat(parts)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        """Convert our parameter, or a rank's slice of it, to `count` HF tensors, or slices of HF tensors."""
        return list(ours.chunk(count))


STACKED = Stacked()


@dataclass(frozen=True, slots=True)
class EitherWay(Stacked):
    """The packing of one HF tensor of many matrices that files store as ours or transposed.

    The shape decides, as in transformers (5.23, core_model_loading.Transpose with check_dims); square matrices are
    taken as ours. An export stores the matrices as the directory that was read.
    """

    matrix: tuple[int, int] = (1, 1)  # (out, in) of one matrix

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        is_ours = tuple(parts[0].shape[1:]) == self.matrix
        return parts[0] if is_ours else parts[0].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class OneByOne(Stacked):
    """The packing of HF's matrices, one or more for each expert, into (experts, out, in); an expert's are
    concatenated."""

    divides_names = True

    experts: int = 1  # number of experts

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        # The parts come expert by expert: gate and up of the first, gate and up of the second, ...
        return _cat(parts).unflatten(0, (self.experts // tp, -1))

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return list(ours.flatten(0, 1).chunk(count))


@dataclass(frozen=True, slots=True)
class ExpertsFirst(Stacked):
    """The packing of PEFT's A (experts * r, in) into (experts, r, in)."""

    experts: int = 1  # number of experts of the whole model

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        return parts[0].unflatten(0, (self.experts // tp, -1))

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return [ours.flatten(0, 1)]


@dataclass(frozen=True, slots=True)
class ExpertsLast(ExpertsFirst):
    """The packing of PEFT's B (out, r * experts), with an expert's columns apart, into (experts, out, r)."""

    mixes_ranks = True  # the columns of one rank's experts are spread over the whole tensor

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        # Column r * experts + e is column r of expert e. Whole, whatever `tp`: see `mixes_ranks`.
        return parts[0].unflatten(1, (-1, self.experts)).permute(2, 0, 1)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return [ours.permute(1, 2, 0).flatten(1)]


@dataclass(frozen=True, slots=True)
class StackedRuns(Stacked):
    """The packing that concatenates HF tensors along the first axis; each HF tensor has one or more runs of rows.

    In our parameter a rank's parts of all runs are contiguous. HF's [q | k | v] of a delta net has three runs: with two
    ranks, rank 0 has the first halves of q, of k and of v.
    """

    rows: tuple[tuple[int, ...], ...]  # lengths of the runs of each HF tensor

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        return self.rows

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return list(ours.split([sum(rows) // tp for rows in self.rows]))


@dataclass(frozen=True, slots=True)
class GroupedQKV(Stacked):
    """The packing of HF's separate queries, keys and values into our groups of heads.

    With two groups of two query heads, HF's q0 q1 q2 q3, k0 k1 and v0 v1 are our q0 q1 k0 v0 q2 q3 k1 v1.
    """

    groups: int = 1  # number of key-value heads
    widths: tuple[int, int, int] = (1, 1, 1)  # number of rows of a group's queries, of its key and of its value

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        # Each part becomes (groups, rows of a group, in), so that joining along axis 1 puts a group's rows together.
        return _cat([part.unflatten(0, (self.groups // tp, -1)) for part in parts], dim=1).flatten(0, 1)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        parts = ours.unflatten(0, (self.groups // tp, -1)).split(list(self.widths), dim=1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True, slots=True)
class GatedGroupedQKV(GroupedQKV):
    """The packing of queries with gates: in HF a head's gate follows its query, in ours a group's gates its queries.

    The rows of a group are q0 g0 q1 g1 in HF, and q0 q1 g0 g1 in ours, before its key and its value. The first of
    `widths` counts the rows of a group's queries and gates.
    """

    head_dim: int = 1  # number of rows of a head's query, and of a head's gate

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        by_head = parts[0].unflatten(0, (self.groups // tp, -1, 2, self.head_dim))
        return GroupedQKV.fuse(self, [by_head.transpose(1, 2).flatten(0, 3), *parts[1:]], tp)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        queries, *others = GroupedQKV.split(self, ours, count, tp)
        by_group = queries.unflatten(0, (self.groups // tp, 2, -1, self.head_dim))
        return [by_group.transpose(1, 2).flatten(0, 3), *others]


@dataclass(frozen=True, slots=True)
class JointQKV(Stacked):
    """The packing of one HF tensor, which has all queries, then all keys, then all values; ours goes head by head.

    HF's q0 q1 k0 k1 v0 v1 are our q0 k0 v0 q1 k1 v1.
    """

    heads: int = 1

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        return [(1, 1, 1)]  # a rank has some heads' queries, the same heads' keys and their values: three runs

    def fuse(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        return parts[0].unflatten(0, (3, self.heads // tp, -1)).transpose(0, 1).flatten(0, 2)

    def split(self, ours: Tensor, count: int, tp: int) -> list[Tensor]:
        return [ours.unflatten(0, (self.heads // tp, 3, -1)).transpose(0, 1).flatten(0, 2)]


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table of weights: one parameter of ours, its HF tensors, and their packing."""

    ours: str  # name of our parameter; layers are counted over the whole model
    hf: tuple[str, ...]  # names of the HF tensors
    packing: Stacked = STACKED  # the packing of the HF tensors in our parameter
    # (out, in) of each HF tensor, if it is the weight of a linear layer that can have adapters. If the tensor holds
    # several matrices, this is the size of one.
    sizes: tuple[tuple[int, int], ...] = ()
    matrices: int = 0  # number of matrices that the HF tensor holds, stacked along its first axis; 0: it is one matrix
    used: int = 1  # number of these matrices with which a token is multiplied
    role: str = ""  # name by which `train.adapter.targets` selects the layer; empty for weights without `sizes`
    # the axis of a linear layer's weight that tensor-parallel ranks divide: 0, the outputs, or 1, the inputs
    axis: int = 0
    # the ranks that divide the parameter: "tp", tensor-parallel ranks, or "ep", expert-parallel ranks
    group: Literal["tp", "ep"] = "tp"
    # the rule of the same parameter for directories that store its matrices one by one; None: there is no such
    # directory
    one_by_one: "Rule | None" = None

    @property
    def numbers(self) -> int:
        """Number of weights of the linear layers that can have adapters."""
        return max(1, self.matrices) * sum(out * width for out, width in self.sizes)


def stored_rules(rules: Iterable[Rule], names: Collection[str]) -> list[Rule]:
    """Return the rules in the form in which a directory stores each parameter, given the names of its tensors."""

    def is_one_by_one(rule: Rule) -> bool:
        return rule.one_by_one is not None and rule.hf[0] not in names and rule.one_by_one.hf[0] in names

    return [rule.one_by_one if is_one_by_one(rule) else rule for rule in rules]


def index_of_layer(ours: str) -> int | None:
    """Return the index, over the whole model, of the language layer that has a parameter of ours; None if none has."""
    return int(ours.removeprefix(LAYERS).partition(".")[0]) if ours.startswith(LAYERS) else None


def global_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter with its name in the table: layers counted over all pipeline ranks."""
    for name, param in model.named_parameters():
        if name.startswith(LAYERS):
            # A chunk counts its layers from 0; `layer_number` counts over the whole model, from 1.
            local, rest = name.removeprefix(LAYERS).split(".", 1)
            name = f"{LAYERS}{model.language.decoder.layers[int(local)].layer_number - 1}.{rest}"
        yield name, param
