"""One optimizer step: forward and backward of the micro batches, the loss, the update."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.batch import MicroBatch
from trainer.distributed import Mesh
from trainer.metrics import PartClock

# The schedule moves hidden states of this many samples; a bin is one long sample.
MICRO_BATCH_SIZE = 1


@dataclass(slots=True)
class Totals:
    """Sums over micro batches: loss on the device, counts on the host. Reduced over ranks only when asked."""

    loss_and_tokens: torch.Tensor
    tokens: int = 0
    slots: int = 0
    vision_flops: float = 0.0
    language_flops: float = 0.0

    @classmethod
    def zero(cls, device: torch.device) -> "Totals":
        return cls(torch.zeros(2, dtype=torch.float64, device=device))

    def count(self, batch: MicroBatch, flops: tuple[float, float]) -> None:
        """Count one micro batch."""
        self.tokens += batch.num_tokens
        self.slots += batch.input_ids.numel()
        self.vision_flops += flops[0]
        self.language_flops += flops[1]

    def over_ranks(self, mesh: Mesh) -> "Totals":
        """The sums over all data-parallel ranks; a collective that waits for the device."""
        counts = torch.tensor(
            [self.tokens, self.slots, self.vision_flops, self.language_flops], dtype=torch.float64, device=mesh.device
        )
        loss_and_tokens = self.loss_and_tokens.clone()
        if mesh.world_size > 1:
            # Context-parallel ranks share a bin: each has a part of its losses, and each counted the whole of it.
            dist.all_reduce(loss_and_tokens, group=mesh.groups.dp_cp)
            dist.all_reduce(counts, group=mesh.groups.dp)
            dist.broadcast(loss_and_tokens, mesh.world_size - 1)  # only the last pipeline rank has a loss
        tokens, slots, vision, language = counts.tolist()
        return Totals(loss_and_tokens, int(tokens), int(slots), vision, language)


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The three-tuple of `calculate_per_token_loss`: sum of losses, loss tokens, and what is to be reported.

    megatron-core divides the gradient by the loss tokens of the whole global batch, over all ranks and micro batches.
    """
    total = losses.sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"loss_and_tokens": torch.stack([total.detach().double(), count.double()])}


def run_micro_batches(
    model: DistributedDataParallel,
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    mesh: Mesh,
    totals: Totals,
    *,
    forward_only: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Forward (and backward) of some micro batches through the pipeline's schedule.

    Returns:
        what each micro batch reported, on the last pipeline rank; also added to `totals`.
    """
    inner = model.module
    clock: PartClock = inner.clock

    def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module):
        clock.switch("data")
        batch = next(iterator).to(mesh.device)
        clock.switch("language")
        totals.count(batch, inner.flops(batch))
        return chunk(batch), loss_of

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=num_micro_batches,
        seq_length=inner.seq_len,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=forward_only,
    )
    for report in reports:
        totals.loss_and_tokens += report["loss_and_tokens"]
    return reports


def train_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, accumulate: Callable[[], object]) -> float:
    """One update; `accumulate()` runs the micro batches. Returns the gradient norm before clipping."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    accumulate()
    model.module.clock.switch("optimizer")
    _, grad_norm, _ = optimizer.step()
    model.module.clock.switch(None)
    return float(grad_norm)
