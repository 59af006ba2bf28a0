"""The two layers as large as the vocabulary: the input embedding, and the output layer with its cross entropy.

The output layer and the loss are one, computed per chunk of loss tokens, so that all logits never exist at once. A
chunk's logits are in the weight's dtype, sums over the vocabulary in float32.

The loss's gradients are computed in backward, where the gradient of each loss is known: the weight's gradient is a sum
over tokens, so a factor per token could not correct it later. So backward computes the logits again, except the logits
of the first chunk, which stay in memory from forward to backward. Up to CHUNK loss tokens nothing is computed twice.

T = tokens, N = loss tokens, D = hidden size, W = words of the vocabulary that this tensor-parallel rank holds.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from trainer.layers.kernel_support import can_import, kernels_run
from trainer.model.shape import LOSS_CHUNK

if can_import():
    from trainer.layers.kernels import differentiate_logits, summarize_logits

# Loss tokens per chunk: 1.24 GB of bf16 logits at 151,936 words. About 30% of a bin of 8,192 tokens have loss, which is
# one chunk. Smaller chunks cost time, as each chunk reads and writes the whole float32 gradient of the weight. This
# takes a sixth of the time of the product itself at 4,096 tokens, and two thirds at 1,024.
CHUNK = LOSS_CHUNK  # other sizes: tests/bench/results/training_step.md


class InputEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding; a rank that holds all words can add its weight's gradient to `main_grad` directly.

    The gradient reads and writes the rows of a bin's words alone. torch makes a gradient as large as the whole
    vocabulary, and adding it to the float32 sums reads and writes all of them: 3 ms a bin at 248,320 words of 2,560
    numbers on an H200, for the few thousand words of a bin.
    """

    # True if the weight has `main_grad`, a float32 buffer of its gradient.
    fuse_wgrad_accumulation = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map words, int64 of any shape, to their vectors, that shape and (D,)."""
        if self.fuse_wgrad_accumulation and self.tp_group.size() == 1:
            return _Embed.apply(tokens, self.weight)
        return super().forward(tokens)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.main_grad = weight.main_grad if ctx.needs_input_grad[1] else None
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.main_grad is not None:
            add_rows(ctx.main_grad, ctx.saved_tensors[0].flatten(), grad.flatten(0, -2))
        return None, None


def add_rows(buffer: torch.Tensor, tokens: torch.Tensor, grad: torch.Tensor) -> None:
    """Add the sum of each word's gradients, rounded to their dtype, to the word's row: the bits of a whole gradient.

    Args:
        buffer: (W, D) float32.
        tokens: (T,) int64.
        grad: (T, D).
    """
    words, places = tokens.sort(stable=True)
    is_next = torch.ones_like(words)
    is_next[1:] = words[1:] != words[:-1]
    numbers = is_next.cumsum(0) - 1
    of_tokens = torch.empty_like(numbers).scatter_(0, places, numbers)
    # The host does not wait for the number of different words: the sums are the first of T rows, in the words' order,
    # and the other rows add zeros to word 0.
    sums = torch.ops.aten.embedding_dense_backward(grad, of_tokens, len(tokens), -1, False)
    rows = torch.zeros_like(words).scatter_(0, numbers, words)
    buffer.index_add_(0, rows, sums.to(buffer.dtype))


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, which returns losses instead of logits; it takes the rows of the whole sequence."""

    # True if the weight has `main_grad`, a float32 buffer of its gradient; the gradient is then added to it directly.
    fuse_wgrad_accumulation = False

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of each loss token, (N,) float32, equal on all tensor-parallel ranks.

        Args:
            hidden: (N, D).
            labels: (N,) int64.
            weight: (W, D), the layer's own weight or that of the tied embedding.
        """
        places = labels - self.tp_group.rank() * len(weight)
        return _OutputLoss.apply(hidden, weight, places, self.tp_group, self.fuse_wgrad_accumulation)


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, places, group, fuse_wgrad_accumulation):
        own = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        logits = _new_chunk(hidden, weight)
        for part in reversed(list(_chunks(len(hidden)))):  # the first chunk comes last, so that a full chunk is kept
            _summarize(_multiply(hidden[part], weight, logits), places[part], own[:, part])
        largest, total, chosen = _over_ranks(own, group)
        ctx.save_for_backward(hidden, weight, places, largest, total)
        ctx.first_logits, ctx.group = logits, group
        ctx.main_grad = weight.main_grad if fuse_wgrad_accumulation and ctx.needs_input_grad[1] else None
        return total.log() - (chosen - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, places, largest, total = ctx.saved_tensors
        upstream = upstream.contiguous()
        first_logits, ctx.first_logits = ctx.first_logits, None  # overwritten below
        logits = _new_chunk(hidden, weight) if first_logits is None else first_logits
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.main_grad
        if grad_weight is None and ctx.needs_input_grad[1]:
            # float32 for the sum over chunks; a single chunk has no sum to round.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32 if len(hidden) > CHUNK else weight.dtype)
        sums = []
        for part in _chunks(len(hidden)):
            is_there = part.start == 0 and first_logits is not None
            grad = logits[: part.stop] if is_there else _multiply(hidden[part], weight, logits)
            _differentiate(grad, places[part], largest[part], total[part], upstream[part])
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
                if ctx.group.size() > 1:  # overlaps the product of the weight's gradient
                    sums.append(dist.all_reduce(grad_hidden[part], group=ctx.group, async_op=True))
            if grad_weight is not None:
                add_product(grad_weight, grad, hidden[part])
        for pending in sums:
            pending.wait()
        is_given = grad_weight is not None and ctx.main_grad is None
        return grad_hidden, grad_weight.to(weight.dtype) if is_given else None, None, None, None


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def _new_chunk(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(min(CHUNK, len(hidden)), len(weight), dtype=weight.dtype, device=weight.device)


def _multiply(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.mm(hidden, weight.t(), out=logits[: len(hidden)])


def _over_ranks(own: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine each rank's statistics to the same three of the whole vocabulary, each (N,) float32.

    Args:
        own: (3, N) float32 of this rank's words: largest logit, sum of exp(logit - largest), the label's logit.
    """
    if group.size() == 1 or not own.numel():
        return own.unbind()
    ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(ranks, own, group=group)
    each_largest, each_total, each_chosen = torch.stack(ranks, dim=1).unbind()
    largest = each_largest.amax(0)
    return largest, (each_total * (each_largest - largest).exp()).sum(0), each_chosen.sum(0)


def add_product(buffer: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add a product to a buffer: buffer (W, D) += grad^T (W, n) hidden (n, D), summed in float32."""
    if not buffer.is_cuda:
        # First the product, then one addition: so two bins give the same bits on one rank and on two ranks.
        buffer += torch.mm(grad.t().to(buffer.dtype), hidden.to(buffer.dtype))
    elif buffer.dtype == grad.dtype:
        buffer.addmm_(grad.t(), hidden)
    else:
        torch.ops.aten.addmm.dtype_out(buffer, grad.t(), hidden, buffer.dtype, out=buffer)


def _summarize(logits: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """See `kernels.summarize_logits`; where the kernel does not run, compute the same in torch."""
    if kernels_run(logits.device):
        summarize_logits(logits, places, out)
        return
    logits = logits.float()
    largest = torch.amax(logits, dim=1, out=out[0])
    torch.sum((logits - largest[:, None]).exp_(), dim=1, out=out[1])
    here = (places >= 0) & (places < logits.size(1))
    out[2] = logits.gather(1, places.clamp(0, logits.size(1) - 1)[:, None])[:, 0].where(here, 0.0)


def _differentiate(
    logits: torch.Tensor, places: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, upstream: torch.Tensor
) -> None:
    """See `kernels.differentiate_logits`; where the kernel does not run, compute the same in torch."""
    if kernels_run(logits.device):
        differentiate_logits(logits, places, largest, total, upstream)
        return
    grad = (logits.float() - largest[:, None]).exp_().mul_((upstream / total)[:, None])
    here = (places >= 0) & (places < logits.size(1))
    minus = -upstream.where(here, 0.0)
    grad.scatter_add_(1, places.clamp(0, logits.size(1) - 1)[:, None], minus[:, None])
    logits.copy_(grad)
