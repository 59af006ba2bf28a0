"""Supervised fine-tuning: the loss of a micro batch, and sums over the micro batches between two lines of metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trainer.data.balance import CostModel
from trainer.data.micro_batch import MicroBatch
from trainer.parallel.mesh import Mesh


def loss_of(
    losses: torch.Tensor,
    lengths: tuple[int, ...] | None = None,
    *,
    num_loss_tokens: int | None = None,
    mtp_factor: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | tuple[int, ...]]]:
    """Return the three that megatron-core's schedules expect with `calculate_per_token_loss`: the sum of the losses,
    the number of loss tokens, and a dict that they pass on to their caller.

    megatron-core divides the gradient by the loss tokens of the whole global batch, over all ranks and micro batches.

    Args:
        losses: (N,), then (M,) of multi-token prediction if its factor is not 0.
        lengths: loss tokens of each sample; if given, the dict also has these lengths and the losses.
        num_loss_tokens: N; None: all losses.
    """
    losses, second = losses.tensor_split((len(losses) if num_loss_tokens is None else num_loss_tokens,))
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)  # torch.tensor waits for the device
    sums = [total.detach().double(), count.double()]  # summed over many micro batches, where float32 would lose digits
    if mtp_factor:
        # Also divided by N, as in megatron-core: there are as many of these losses, but for the second token of a
        # sample.
        second_total = second.sum()
        sums += [second_total.detach().double(), torch.full_like(sums[1], second.numel())]
        total = total + mtp_factor * second_total
    passed_on = {"loss_and_tokens": torch.stack(sums)}
    if lengths is not None:
        passed_on |= {"losses": losses.detach(), "loss_lengths": lengths}
    return total, count, passed_on


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
