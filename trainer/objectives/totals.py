"""Sums over the micro batches of the steps between two lines of metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trainer.data.balance import CostModel
from trainer.data.micro_batch import MicroBatch
from trainer.parallel.mesh import Mesh


@dataclass(slots=True)
class Totals:
    """Sums over micro batches: loss on the device, counts on the host. Only `over_ranks` reduces them over ranks."""

    # (2,) float64, the sum of the losses and the number of loss tokens; with multi-token prediction (4,), then the same
    # two of its losses
    loss_and_tokens: torch.Tensor
    tokens: int = 0  # number of tokens without padding
    slots: int = 0  # number of tokens with padding
    flops: Counter[str] = field(default_factory=Counter)  # FLOPs of each part of the model that is counted separately
    cost: CostModel | None = None  # FLOPs of one unit of each kind of work; None: FLOPs are not counted

    @classmethod
    def zero(cls, device: torch.device, cost: CostModel | None = None, *, has_mtp: bool = False) -> "Totals":
        return cls(torch.zeros(4 if has_mtp else 2, dtype=torch.float64, device=device), cost=cost)

    def count(self, batch: MicroBatch, flops: Mapping[str, float]) -> None:
        self.tokens += batch.num_tokens
        self.slots += batch.num_slots
        self.flops.update(flops)

    def over_ranks(self, mesh: Mesh) -> torch.Tensor:
        """Return the sums over all data-parallel ranks, float64 on the device: `loss_and_tokens`, tokens, slots, and
        the FLOPs in their order. A collective that waits for nothing."""
        is_cuda, counts = mesh.device.type == "cuda", [self.tokens, self.slots, *self.flops.values()]
        counted = torch.tensor(counts, dtype=torch.float64, pin_memory=is_cuda).to(mesh.device, non_blocking=True)
        loss_and_tokens = self.loss_and_tokens.clone()
        if mesh.world_size > 1:
            # Context-parallel ranks share a bin: each has some of the losses, but each has counted the whole bin.
            dist.all_reduce(loss_and_tokens, group=mesh.groups.dp_cp)
            dist.all_reduce(counted, group=mesh.groups.dp)
            dist.broadcast(loss_and_tokens, mesh.world_size - 1)  # only the last pipeline rank has a loss
        return torch.cat([loss_and_tokens, counted])
