"""One optimizer step: forward and backward of the micro batches, the loss, the update."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.data.flops import model_flops
from trainer.data.micro_batch import MicroBatch
from trainer.layers.measures.part_clock import PartClock
from trainer.libraries.torch_private import flatten_together, views_of_flat
from trainer.loop.optim import clip_and_update
from trainer.objectives.sft import Totals, loss_of
from trainer.parallel.mesh import Mesh

# The schedule moves hidden states of this many samples; a bin is one long sample.
MICRO_BATCH_SIZE = 1


def run_micro_batches(
    chunks: Sequence[DistributedDataParallel],
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    mesh: Mesh,
    totals: Totals,
    *,
    forward_only: bool = False,
    return_per_token_outputs: bool = False,
) -> list[dict[str, torch.Tensor | tuple[int, ...]]]:
    """Run micro batches forward (and backward) through the pipeline's schedule, and return their reports.

    The reports exist on the last pipeline rank, and are also added to `totals`.

    Args:
        return_per_token_outputs: also report `losses` (N,) float32, left on the device, and `loss_lengths`, the number
            of losses of each sample. Evaluation needs them, a training step does not.
    """
    clock: PartClock = chunks[0].module.clock

    def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module):
        clock.switch("data")
        batch = next(iterator)
        clock.switch("language")
        if chunk is chunks[0]:
            totals.count(batch, {} if totals.cost is None else model_flops(totals.cost, batch))
        output = chunk(batch)
        clock.switch_on_gradient(output, "language")  # a pipeline's step ends with backward passes only
        lengths = batch.loss_lengths if return_per_token_outputs else None
        if not (chunk.training and chunk.module.mtp_loss_scaling_factor):
            return output, partial(loss_of, lengths=lengths)
        sizes = {"num_loss_tokens": len(batch.labels), "mtp_factor": chunk.module.mtp_loss_scaling_factor}
        return output, partial(loss_of, lengths=lengths, **sizes)

    exchange = chunks[0].module.exchange
    moved = (batch.to(mesh.device) for batch in batches)
    # Every chunk of a virtual pipeline sees every micro batch.
    iterators = itertools.tee(exchange.encoded(moved, num_micro_batches) if exchange else moved, len(chunks))
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


def finalize_gradients(
    chunks: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **kwargs: object
) -> None:
    """Run megatron-core's `finalize_model_grads`, given the loss tokens of this rank on the last pipeline rank, a
    tensor ()."""
    if chunks[0].module.exchange:
        # The image exchange's part of the backward pass, which the schedule does not know.
        chunks[0].module.exchange.finish_backward()
    finalize_model_grads(chunks, None, **kwargs)
    if num_tokens is not None:
        # By the loss tokens of the global batch.
        _divide_gradients(chunks, num_tokens)
    for chunk in chunks:
        # Partial gradients are summed over tensor-parallel ranks.
        grads = [param.main_grad for param in chunk.module.partial_gradients()]
        if grads:
            flat = flatten_together(grads)
            dist.all_reduce(flat, group=chunk.module.groups.tp)
            for grad, total in zip(grads, views_of_flat(flat, grads)):
                grad.copy_(total)


def _divide_gradients(chunks: list[DistributedDataParallel], num_tokens: torch.Tensor) -> None:
    """Divide the gradients by the loss tokens, as megatron-core does, which first waits until it knows that there are
    any."""
    pp, dp_cp = chunks[0].module.groups.pp, chunks[0].module.groups.dp_cp
    if pp.size() > 1:
        dist.broadcast(num_tokens, dist.get_global_rank(pp, pp.size() - 1), group=pp)
    if dp_cp.size() > 1:
        dist.all_reduce(num_tokens, group=dp_cp)
    factor = torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0)
    for chunk in chunks:
        chunk.scale_gradients(factor)


def train_step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    accumulate: Callable[[], object],
) -> torch.Tensor:
    """Run one update, of which `accumulate()` runs the micro batches; return `squared_grad_norms` on the device."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    accumulate()
    clock: PartClock = chunks[0].module.clock
    clock.switch("optimizer")
    squares = clip_and_update(optimizer, next(chunks[0].parameters()).device)
    clock.switch(None)
    return squares
