"""Low-rank adapters of linear layers: their computation, their places in a chunk of the model, their table of weights.

A layer of ours may hold several Hugging Face modules' weights in one matrix, with its own order of rows. All adapters
of a layer are computed in two products: with the concatenated A's, (k * rank, in), and with the B's as blocks of a
matrix (out, k * rank). The rows of that matrix are brought into the layer's order, like the rows of the weights.

The adapters of experts are in trainer/parts/experts/module.py.

k = adapted modules of the layer, T = tokens, s = T / tp with sequence parallel, else T.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from trainer.contract.adapter import AdapterConfig
from trainer.layers.sharded_parameters import in_runs, mark_sharded
from trainer.model.adapters import Adapted, adapted_layers, rules_to_save
from trainer.model.rules import ExpertsFirst, ExpertsLast, Rule, Stacked, global_names
from trainer.parallel.meta_parameters import copy_into


def add_adapters(model: torch.nn.Module, layers: Sequence[Adapted], config: AdapterConfig, seed: int) -> None:
    """Add freshly initialised adapters to a chunk's layers and freeze all other parameters of the chunk."""
    model.has_adapters = True
    for param in model.parameters():
        param.requires_grad = False
    for module in model.modules() if config.dropout else ():
        # If such a layer is recomputed, it draws the same dropout again.
        if hasattr(module, "is_random"):
            module.is_random = True
    for layer, linear in _modules(model, layers):
        if layer.rule.matrices:
            linear.adapt(_parameter_of(layer), config).initialise(layer.modules, seed)
            continue
        # Ours, megatron-core's and Transformer Engine's classes all have it in their names, and no class in common.
        is_column = "Column" in type(linear).__name__
        adapter = LinearAdapter(linear, layer.rule, layer.chosen, config, is_column=is_column)
        adapter.initialise(layer.modules, seed)
        linear.adapter = adapter
        # The class and not a wrapper around the module: the names of its parameters stay those of a checkpoint.
        linear.__class__ = _with_adapter(type(linear))


def initialise_sharded_adapters(
    model: torch.nn.Module,
    layers: Sequence[Adapted],
    config: AdapterConfig,
    seed: int,
    read: Callable[[Rule, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Set the initial values of the adapters of a chunk that was sharded before it had memory.

    Args:
        read: returns the whole weight of a rule, given the rule and its parameter.
    """
    for layer, linear in _modules(model, layers):
        adapter = linear.adapter[_parameter_of(layer)] if layer.rule.matrices else linear.adapter
        adapter.initialise(layer.modules, seed)
        if config.kind == "dora":
            adapter.measure(read(layer.rule, linear.weight).to(linear.weight.dtype))


def _modules(model: torch.nn.Module, layers: Sequence[Adapted]) -> Iterator[tuple[Adapted, torch.nn.Module]]:
    """Yield each layer that the chunk holds, with the module that holds its weight."""
    ours = zip(model.named_parameters(), global_names(model), strict=True)
    modules = {whole: name.rpartition(".")[0] for (name, _), (whole, _) in ours}
    for layer in layers:
        if layer.rule.ours in modules:
            yield layer, model.get_submodule(modules[layer.rule.ours])


def _parameter_of(layer: Adapted) -> str:
    return layer.ours.rpartition(".")[2]


@functools.cache
def _with_adapter(kind: type) -> type:
    """Return the subclass of `kind` for linear layers that have an adapter."""

    class WithAdapter(kind):
        def forward(self, x: torch.Tensor, *args: object, **kwargs: object):
            out, bias = super().forward(x, *args, **kwargs)
            is_returned = self.te_return_bias if hasattr(self, "te_return_bias") else self.skip_bias_add
            has_none = self.bias is None or not self.bias.numel()  # Transformer Engine has an empty bias then
            # The bias that `out` already contains, which DoRA must not scale.
            added = None if is_returned or has_none else self.bias
            return self.adapter(self, x, out, added), bias

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return state | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)

    WithAdapter.__name__ = f"{kind.__name__}WithAdapter"
    return WithAdapter


class Adapter(torch.nn.Module):
    """The adapters of one parameter of ours; all of its parameters are trained."""


def initial_a(name: str, seed: int, *shape: int) -> torch.Tensor:
    """Return PEFT's initial values of an A (..., in): uniform within 1 / sqrt(in), Kaiming's with a = sqrt(5)."""
    # The values depend only on the seed and the HF name, not on the layout: a rank takes its part of the whole A.
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8]))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[-1])


class LinearAdapter(Adapter):
    """The adapters of one linear layer.

    Args:
        chosen: for each of the rule's HF tensors whether it is adapted.
        is_column: whether ranks divide the layer's output (column-parallel), and not its input (row-parallel).
    """

    def __init__(
        self, linear: torch.nn.Module, rule: Rule, chosen: Sequence[bool], config: AdapterConfig, *, is_column: bool
    ) -> None:
        super().__init__()
        self.config, self.packing, self.is_column = config, rule.packing, is_column
        self.tp, self.sequence_parallel = linear.tp_group, linear.config.sequence_parallel
        weight = linear.weight
        empty = torch.empty(len(weight), 0, device="meta")
        ranks = self.tp.size() if is_column else 1
        self.rows = [len(part) for part in self.packing.split(empty, len(rule.hf), ranks)]
        self.chosen = [number for number, is_chosen in enumerate(chosen) if is_chosen]
        like = {"dtype": weight.dtype, "device": weight.device}
        self.a = torch.nn.ParameterDict(
            {str(n): torch.nn.Parameter(torch.empty(config.rank, weight.size(1), **like)) for n in self.chosen}
        )
        self.b = torch.nn.ParameterDict(
            {str(n): torch.nn.Parameter(torch.zeros(self.rows[n], config.rank, **like)) for n in self.chosen}
        )
        # (out,) float32 squared lengths of W's rows; computed at first use, since copies of the encoder get W late
        self._squares: torch.Tensor | None = None
        self.magnitude = torch.nn.ParameterDict()
        if config.kind == "dora":
            sizes = {str(n): torch.empty(self.rows[n], **like) for n in self.chosen}
            self.magnitude.update({name: torch.nn.Parameter(empty) for name, empty in sizes.items()})
            self.measure(weight)
        # Ranks divide B's rows and the magnitudes of a column-parallel layer, and A's columns of a row-parallel one.
        divided, whole = [self.b, self.magnitude], [self.a]
        if not is_column:
            divided, whole = [self.a], [self.b, self.magnitude]
        for param in (param for params in divided for param in params.values() if self.tp.size() > 1):
            mark_sharded(param, 0 if is_column else 1)
        for param in (param for params in whole for param in params.values()):
            # With sequence parallelism a rank has only the gradient of its own tokens; by the mark megatron-core sums
            # them.
            param.sequence_parallel = self.sequence_parallel

    @torch.no_grad()
    def initialise(self, names: Sequence[str], seed: int) -> None:
        """Set A as PEFT does; B is zero already."""
        for number in self.chosen:
            a = self.a[str(number)]
            ranks, rank = (1, 0) if self.is_column else (self.tp.size(), self.tp.rank())
            whole = initial_a(names[number], seed, len(a), a.size(1) * ranks)
            copy_into(a, whole.chunk(ranks, 1)[rank])

    @torch.no_grad()
    def measure(self, weight: torch.Tensor) -> None:
        """Set DoRA's magnitudes to their initial values, the lengths of the rows of the layer's weight."""
        ranks = self.tp.size() if self.is_column else 1
        lengths = self.packing.split(self._row_lengths(weight, None, None), len(self.rows), ranks)
        for number, magnitude in self.magnitude.items():
            copy_into(magnitude, lengths[int(number)])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        divided = {f"{'b' if self.is_column else 'a'}.{n}": int(not self.is_column) for n in self.chosen}
        if self.is_column:
            divided |= {f"magnitude.{n}": 0 for n in self.chosen}
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            divided,
            sharded_offsets,
            tp_group=self.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in divided if self.is_column and self.tp.size() > 1 else ():
            number = int(name.rpartition(".")[2])
            runs = self.packing.runs(len(self.rows))[number]
            if len(runs) > 1 and prefix + name in state:
                rows = [self.rows[number] * run // sum(runs) for run in runs]
                state[prefix + name] = in_runs(state[prefix + name], rows, self.tp.rank(), self.tp.size())
        return state

    def _whole_b(self) -> torch.Tensor:
        """Return all B's as one block matrix (out, k * rank), in the layer's order of rows."""
        rank, ranks = self.config.rank, self.tp.size() if self.is_column else 1
        parts = []
        for number, rows in enumerate(self.rows):
            if number in self.chosen:
                place = self.chosen.index(number)
                parts.append(F.pad(self.b[str(number)], (place * rank, (len(self.chosen) - 1 - place) * rank)))
            else:
                like = self.b[str(self.chosen[0])]
                parts.append(like.new_zeros(rows, len(self.chosen) * rank))
        return self.packing.fuse(parts, ranks)

    def forward(
        self, linear: torch.nn.Module, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output with its adapters applied.

        Args:
            x: input of the matrix product: (s, 1, in) if column-parallel, (T, 1, in / tp) if row-parallel.
            out: output of the layer without adapters: (T, 1, out / tp) if column-parallel, (s, 1, out) if row-parallel.
            bias: the layer's bias, if `out` contains it.
        """
        a, b = torch.cat([*self.a.values()]), self._whole_b()
        # Scale here, where a row has only `rank` values per adapter: this saves two passes over the output each way.
        low = F.linear(F.dropout(x, self.config.dropout, self.training), a) * self.config.scaling
        if self.tp.size() > 1:
            low = self._exchanged(low)
        delta = F.linear(low, b)
        if not self.magnitude:
            return out + delta
        scale = self._scale(linear.weight, a, b)
        scaled = (out + delta) * scale
        return scaled if bias is None else scaled + bias * (1 - scale)

    def _exchanged(self, low: torch.Tensor) -> torch.Tensor:
        if self.is_column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp)
        if self.is_column:
            return copy_to_tensor_model_parallel_region(low, group=self.tp)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.tp)
        return reduce_from_tensor_model_parallel_region(low, group=self.tp)

    def _scale(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return (out,): each row's magnitude over the row length of the adapted weight; 1 where nothing is adapted."""
        with torch.no_grad():
            lengths = self._row_lengths(weight, a, b)
        ranks, count = self.tp.size() if self.is_column else 1, len(self.rows)
        parts = list(self.packing.split(lengths[:, None], count, ranks))
        wanted = [self.magnitude[str(n)][:, None] if n in self.chosen else part for n, part in enumerate(parts)]
        return (self.packing.fuse(wanted, ranks) / lengths[:, None])[:, 0]

    def _row_lengths(self, weight: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
        """Return (out,) lengths of the rows of W + scaling * B A, or of W if A and B are None."""
        squares = self._squares if a is not None else None
        if squares is None:
            squares = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32).square()
        if a is not None:
            # |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B for each row. B A is never formed: all
            # products have an inner or outer dimension of the adapters' rank.
            self._squares, scaling = squares, self.config.scaling
            low = 2 * scaling * F.linear(weight, a) + scaling**2 * F.linear(b, a @ a.T)
            squares = squares + low.mul(b).sum(1, dtype=torch.float32)
        if not self.is_column and self.tp.size() > 1:
            dist.all_reduce(squares, group=self.tp)
        return squares.sqrt().to(weight.dtype)


@dataclass(frozen=True, slots=True)
class InRuns(Stacked):
    """The packing of one HF tensor whose rows form several runs; a tensor-parallel rank holds a part of each run."""

    relative: tuple[int, ...] = (1,)

    def runs(self, count: int) -> Sequence[tuple[int, ...]]:
        return [self.relative]


def adapter_rules(layers: Sequence[Adapted], config: AdapterConfig) -> list[Rule]:
    """Return the table of the adapters' weights, with PEFT's names."""
    rules = []
    for layer in layers:
        if experts := layer.rule.matrices:
            module, _, name = layer.ours.rpartition(".")
            ours, (peft,) = f"{module}.adapter.{name}", layer.peft
            rules.append(Rule(f"{ours}.a", (f"{peft}.lora_A.weight",), ExpertsFirst(experts=experts), group="ep"))
            rules.append(Rule(f"{ours}.b", (f"{peft}.lora_B.weight",), ExpertsLast(experts=experts), group="ep"))
            continue
        runs = layer.rule.packing.runs(len(layer.rule.hf))
        for number, module in enumerate(layer.peft):
            if not layer.chosen[number]:
                continue
            ours, packing = f"{layer.ours}.adapter", InRuns(relative=runs[number])
            rules.append(Rule(f"{ours}.a.{number}", (f"{module}.lora_A.weight",)))
            rules.append(Rule(f"{ours}.b.{number}", (f"{module}.lora_B.weight",), packing))
            if config.kind == "dora":
                rules.append(Rule(f"{ours}.magnitude.{number}", (f"{module}.lora_magnitude_vector",), packing))
    return rules


def trained_rules(rules: Sequence[Rule], config: AdapterConfig) -> list[Rule]:
    """Return the table of all trained weights with PEFT's names, adapters first."""
    return [*adapter_rules(adapted_layers(rules, config), config), *rules_to_save(rules, config)]


def train_whole(model: torch.nn.Module, rules: Sequence[Rule]) -> None:
    """Mark the parameters of a chunk that these rules name as trained whole."""
    ours = {rule.ours for rule in rules}
    for name, param in global_names(model):
        if name in ours:
            param.requires_grad = param.trained_whole = True


def trained_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a chunk's adapters and of its modules trained whole, whether or not currently frozen."""
    for module in model.modules():
        if isinstance(module, Adapter):
            yield from module.parameters()
    yield from (param for param in model.parameters() if getattr(param, "trained_whole", False))
