"""Low-rank adapters of the experts' matrices, as PEFT computes them for stacked matrices (0.21, ParamWrapper).

E = experts of this rank, r = rank of the adapters, R = rows sorted by expert.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from trainer.contract.adapter import AdapterConfig
from trainer.layers.lora.adapter import Adapter
from trainer.parallel.meta_parameters import copy_into
from trainer.parts.experts.products import ROW_MULTIPLE, grouped_product


class ExpertsAdapter(Adapter):
    """The adapters of a parameter that holds one matrix per expert; expert-parallel ranks divide both alike.

    Args:
        weight: (E, out, in).
    """

    def __init__(
        self, weight: torch.nn.Parameter, config: AdapterConfig, groups: ProcessGroupCollection, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.scaling, self.groups = config.scaling, groups
        (experts, out, width), like = weight.shape, {"dtype": dtype, "device": weight.device}
        self.a = torch.nn.Parameter(torch.empty(experts, config.rank, width, **like))
        self.b = torch.nn.Parameter(torch.zeros(experts, out, config.rank, **like))
        for param in (self.a, self.b):
            mark_of_experts(param)

    @torch.no_grad()
    def initialise(self, names: Sequence[str], seed: int) -> None:
        """Set A as PEFT does: uniform within 1 / sqrt(in); B is zero already."""
        (name,), group = names, self.groups.ep
        # The values depend only on the seed and the name of the HF tensor, not on the layout.
        key = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8]))
        whole = torch.empty(len(self.a) * group.size(), *self.a.shape[1:]).uniform_(-1, 1, generator=generator)
        copy_into(self.a, (whole / math.sqrt(whole.size(2))).chunk(group.size())[group.rank()])

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the products of rows (R, in): (R, out)."""
        a, b = self.matrices()
        return grouped_product(grouped_product(rows, a, ends) * self.scaling, b, ends)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (E, r', in) and B (E, out, r'). If r is no multiple of ROW_MULTIPLE, zeros fill up to the next."""
        missing = -self.a.size(1) % ROW_MULTIPLE
        if not missing:  # torch would copy them
            return self.a, self.b
        return F.pad(self.a, (0, 0, 0, missing)), F.pad(self.b, (0, missing))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        groups = {"tp_group": self.groups.ep, "dp_cp_group": self.groups.expt_dp}
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets, **groups)


def mark_of_experts(weight: torch.nn.Parameter) -> None:
    """Mark a parameter whose first axis expert-parallel ranks divide."""
    # megatron-core then sums its gradient over the ranks that hold the same experts.
    weight.allreduce = False
    # With these marks it counts in norms on every rank that holds a part.
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
