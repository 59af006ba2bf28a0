"""The input embedding, whose gradient reads and writes the rows of a bin's words alone.

torch makes a gradient as large as the whole vocabulary, and adding it to the float32 sums reads and writes all of them:
3 ms a bin at 248,320 words of 2,560 numbers on an H200, for the few thousand words of a bin.

T = tokens, W = words of the vocabulary, D = hidden size.
"""

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch.autograd.function import once_differentiable


class InputEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding; a rank that holds all words can add its weight's gradient to `main_grad` directly."""

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
