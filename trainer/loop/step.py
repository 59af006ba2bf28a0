"""One optimizer step: forward and backward of the micro batches, the gradients over the ranks, the update."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.data.flops import model_flops
from trainer.data.micro_batch import MicroBatch
from trainer.layers.measures import PartClock, Reports
from trainer.libraries.torch_private import flatten_together, views_of_flat
from trainer.loop.loss import Totals, loss_of
from trainer.loop.optim import clip_and_update
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.exchange import PipelineWorker, VisionOwner

# The schedule moves hidden states of this many samples; a bin is one long sample.
MICRO_BATCH_SIZE = 1

# A chunk of the model, wrapped for data parallelism; virtual pipeline stages give a rank several.
Chunk: TypeAlias = DistributedDataParallel | FullyShardedModel


@dataclass(slots=True)
class StepContext:
    """The things that all steps of a rank share beside the model, the optimizer and the data. `set_up` makes it."""

    mesh: Mesh
    clock: PartClock  # the model's chunks have it too, and switch it from one part of the step to the next
    reports: Reports  # the numbers that layers report, such as the loads of experts
    # the exchange of image tokens, if other ranks encode images for this one, or this one for others
    exchange: VisionOwner | PipelineWorker | None
    totals: Totals  # sums over the micro batches since the last line of metrics.jsonl


def train_step(
    chunks: Sequence[Chunk],
    optimizer: ChainedOptimizer,
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    context: StepContext,
) -> torch.Tensor:
    """Run one update and return `squared_grad_norms` on the device."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # The last thing that the schedule does is to call `finalize_gradients`.
    run_micro_batches(chunks, batches, num_micro_batches, context)
    context.clock.switch("optimizer")
    squares = clip_and_update(optimizer, next(chunks[0].parameters()).device)
    context.clock.switch(None)
    return squares


def run_micro_batches(
    chunks: Sequence[Chunk],
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    context: StepContext,
    *,
    forward_only: bool = False,
    return_per_token_outputs: bool = False,
) -> list[dict[str, torch.Tensor | tuple[int, ...]]]:
    """Run micro batches forward (and backward) through the pipeline's schedule, and return what `loss_of` says of each.

    Only the last pipeline rank has losses; elsewhere the list is empty. The losses are also added to `context.totals`.

    Args:
        return_per_token_outputs: also return `losses` (N,) float32, left on the device, and `loss_lengths`, the number
            of losses of each sample. Evaluation needs them, a training step does not.
    """
    clock, totals, exchange = context.clock, context.totals, context.exchange

    def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module):
        clock.switch("data")
        batch = next(iterator)
        clock.switch("language")
        if chunk is chunks[0]:  # every chunk sees the batch, which counts once
            totals.count(batch, {} if totals.cost is None else model_flops(totals.cost, batch))
        output = chunk(batch)
        clock.switch_on_gradient(output, "language")  # a pipeline's step ends with backward passes only
        lengths = batch.loss_lengths if return_per_token_outputs else None
        # An evaluation does not predict the token after the next: the held-out loss is the same with and without it.
        if not (chunk.training and chunk.module.mtp_loss_scaling_factor):
            return output, partial(loss_of, lengths=lengths)
        sizes = {"num_loss_tokens": len(batch.labels), "mtp_factor": chunk.module.mtp_loss_scaling_factor}
        return output, partial(loss_of, lengths=lengths, **sizes)

    moved = (batch.to(context.mesh.device) for batch in batches)
    if exchange is not None:
        # Reads batches ahead of the schedule, to encode their images before another rank waits for them.
        moved = exchange.encoded(moved, num_micro_batches)
    # Every chunk of a virtual pipeline sees every micro batch.
    iterators = itertools.tee(moved, len(chunks))
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(iterators),
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=chunks[0].module.seq_len,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=forward_only,
    )
    for of_micro_batch in losses:
        totals.loss_and_tokens += of_micro_batch["loss_and_tokens"]
    return losses


def finalize_gradients(
    context: StepContext, chunks: list[Chunk], num_tokens: torch.Tensor | None = None, **kwargs: object
) -> None:
    """Sum the gradients over the ranks and divide them by the loss tokens of the global batch.

    The schedule calls this after the last backward pass, with the loss tokens of this rank on the last pipeline rank, a
    tensor ().
    """
    groups = context.mesh.groups
    if context.exchange is not None:
        # The schedule does not know of the image exchange's part of the backward pass. It comes first, because it adds
        # to the gradients that data parallelism sums below.
        context.exchange.finish_backward()
    # Without the number of tokens, so that megatron-core does not divide: it first reads the number on the host, to
    # know whether there are any.
    finalize_model_grads(chunks, None, **kwargs)
    if num_tokens is not None:
        if groups.pp.size() > 1:
            dist.broadcast(num_tokens, dist.get_global_rank(groups.pp, groups.pp.size() - 1), group=groups.pp)
        if groups.dp_cp.size() > 1:
            dist.all_reduce(num_tokens, group=groups.dp_cp)
        factor = torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0)
        for chunk in chunks:
            chunk.scale_gradients(factor)
    for chunk in chunks:
        # Partial gradients are summed over tensor-parallel ranks, in one collective for all of a chunk's.
        grads = [param.main_grad for param in chunk.module.partial_gradients()]
        if grads:
            flat = flatten_together(grads)
            dist.all_reduce(flat, group=groups.tp)
            for grad, total in zip(grads, views_of_flat(flat, grads)):
                grad.copy_(total)
