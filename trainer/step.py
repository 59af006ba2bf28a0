"""One optimizer step: forward and backward of the micro batches, the loss, the update."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.batch import MicroBatch
from trainer.distributed import Mesh
from trainer.metrics import PartClock
from trainer.optim import grad_norms_by_part
from trainer.ragged import Ragged

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
        self.slots += batch.num_slots
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


def loss_of(
    losses: torch.Tensor, lengths: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | Ragged]]:
    """The three-tuple of `calculate_per_token_loss`: sum of losses, loss tokens, and what is to be reported.

    megatron-core divides the gradient by the loss tokens of the whole global batch, over all ranks and micro batches.

    Args:
        lengths: loss tokens of each sample, to report the losses themselves as well.
    """
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)  # torch.tensor waits for the device
    report = {"loss_and_tokens": torch.stack([total.detach().double(), count.double()])}
    return total, count, report | ({} if lengths is None else {"losses": Ragged(losses.detach(), lengths)})


def run_micro_batches(
    chunks: Sequence[DistributedDataParallel],
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    mesh: Mesh,
    totals: Totals,
    *,
    forward_only: bool = False,
    return_per_token_outputs: bool = False,
) -> list[dict[str, torch.Tensor | Ragged]]:
    """Forward (and backward) of some micro batches through the pipeline's schedule.

    Args:
        return_per_token_outputs: also report `losses`, Ragged, a member a sample, float32, left on the device; for
            evaluation: a training step has no use for them.

    Returns:
        what each micro batch reported, on the last pipeline rank; also added to `totals`.
    """
    clock: PartClock = chunks[0].module.clock

    def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module):
        clock.switch("data")
        batch = next(iterator)
        clock.switch("language")
        if chunk is chunks[0]:
            totals.count(batch, chunk.module.flops(batch))
        return chunk(batch), partial(loss_of, lengths=batch.labels.lengths if return_per_token_outputs else None)

    # Every chunk of a virtual pipeline sees every micro batch.
    iterators = itertools.tee((batch.to(mesh.device) for batch in batches), len(chunks))
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(iterators),
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=chunks[0].module.seq_len,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=forward_only,
    )
    for report in reports:
        totals.loss_and_tokens += report["loss_and_tokens"]
    return reports


def finalize_gradients(chunks: list[DistributedDataParallel], *args: object, **kwargs: object) -> None:
    """megatron-core's `finalize_model_grads`, and the sums over tensor-parallel ranks that it does not know of."""
    finalize_model_grads(chunks, *args, **kwargs)
    for chunk in chunks:
        grads = [param.main_grad for param in chunk.module.partial_gradients()]
        if grads:
            flat = torch._utils._flatten_dense_tensors(grads)
            dist.all_reduce(flat, group=chunk.module.groups.tp)
            for grad, total in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
                grad.copy_(total)


def train_step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    accumulate: Callable[[], object],
    *,
    by_part: bool,
) -> tuple[float, dict[str, float]]:
    """One update; `accumulate()` runs the micro batches.

    Returns:
        the gradient norm before clipping, and that of each trained part if `by_part` asks for it, else none.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    accumulate()
    clock: PartClock = chunks[0].module.clock
    clock.switch("optimizer")
    norms = grad_norms_by_part(optimizer, next(chunks[0].parameters()).device) if by_part else {}
    _, grad_norm, _ = optimizer.step()
    clock.switch(None)
    return float(grad_norm), norms
