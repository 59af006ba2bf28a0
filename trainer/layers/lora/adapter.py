"""The adapters of one linear layer of ours, one for each Hugging Face module whose weight the layer holds.

A layer of ours may hold several modules' weights in one matrix, with its own order of rows. All adapters of a layer are
computed in two products: with the concatenated A's, (k * rank, in), and with the B's as blocks of a matrix
(out, k * rank). The rows of that matrix are brought into the layer's order, like the rows of the weights.

k = adapted modules of the layer, T = tokens, s = T / tp with sequence parallel, else T.
"""

import hashlib
import math
from collections.abc import Sequence

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
from trainer.layers.sharded_runs import in_runs
from trainer.model.rules import Rule
from trainer.parallel.late_memory import put


class Adapter(torch.nn.Module):
    """The adapters of one parameter of ours; all of its parameters are trained."""


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
        self._mark()

    def _mark(self) -> None:
        """Mark the parameters that ranks divide, and those with a partial gradient under sequence parallelism."""
        divided, whole = (self.b, self.a) if self.is_column else (self.a, self.b)
        for param in divided.values() if self.tp.size() > 1 else ():
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, int(not self.is_column), 1
        for param in whole.values():
            param.sequence_parallel = self.sequence_parallel
        for param in self.magnitude.values():
            if self.is_column and self.tp.size() > 1:
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1
            elif not self.is_column:
                param.sequence_parallel = self.sequence_parallel

    @torch.no_grad()
    def initialise(self, names: Sequence[str], seed: int) -> None:
        """Set A as PEFT does: uniform within 1 / sqrt(in) (Kaiming with a = sqrt(5)); B is zero already."""
        for number in self.chosen:
            a = self.a[str(number)]
            ranks, rank = (1, 0) if self.is_column else (self.tp.size(), self.tp.rank())
            # A module's values depend only on the seed and its HF name, not on the layout.
            key = hashlib.sha256(f"{seed} {names[number]}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8]))
            whole = torch.empty(len(a), a.size(1) * ranks).uniform_(-1, 1, generator=generator)
            put(a, (whole / math.sqrt(whole.size(1))).chunk(ranks, 1)[rank])

    @torch.no_grad()
    def measure(self, weight: torch.Tensor) -> None:
        """Set DoRA's magnitudes to their initial values, the lengths of the rows of the layer's weight."""
        ranks = self.tp.size() if self.is_column else 1
        lengths = self.packing.split(self._row_lengths(weight, None, None), len(self.rows), ranks)
        for number, magnitude in self.magnitude.items():
            put(magnitude, lengths[int(number)])

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
