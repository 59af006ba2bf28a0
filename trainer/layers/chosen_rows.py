"""The tokens of a bin that later layers still need, and the tokens that layers route.

t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t; D = hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.distributed import ProcessGroup

from trainer.data.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The rows that the rest of the model computes."""

    index: torch.Tensor  # (m,) int64 indices into the t tokens
    # the tensor-parallel ranks, if sequence parallelism divides the tokens among them. Each rank then holds m / tp of
    # the chosen rows. None if every rank holds all tokens.
    sharers: ProcessGroup | None

    @classmethod
    def of(cls, index: torch.Tensor, sharers: ProcessGroup | None, multiple: int) -> "ChosenRows":
        """Choose the rows of `index` (N,), padded to a multiple of `multiple` rows on each rank."""
        multiple *= 1 if sharers is None else sharers.size()
        # At least one row, so that no module needs a special case for matrix products of zero rows.
        size = max(1, -(-len(index) // multiple)) * multiple
        return cls(F.pad(index, (0, size - len(index))), sharers)

    def of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Select the rows of (s, 1, D): (m, 1, D), or this rank's (m / tp, 1, D) with sequence parallelism."""
        if self.sharers is None:
            return hidden.index_select(0, self.index)
        whole = gather_from_sequence_parallel_region(hidden, group=self.sharers)
        return whole.index_select(0, self.index.chunk(self.sharers.size())[self.sharers.rank()])

    def of_attended(self, attended: torch.Tensor) -> torch.Tensor:
        """Select the rows of this rank's heads: (t, 1, width) -> (m, 1, width)."""
        return attended.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The tokens of a bin that layers route.

    s = tokens of this rank, after context and sequence parallelism.
    """

    is_token: torch.Tensor  # (s,) bool, False for padding
    num_tokens: int  # number of tokens of the bin, over all ranks
    num_loss_tokens: int  # number of loss tokens of the bin, over all ranks
    sharers: Sequence[ProcessGroup]  # the groups of ranks that hold different tokens of the bin

    @classmethod
    def of(cls, batch: MicroBatch, cp: ProcessGroup, tp: ProcessGroup | None) -> "RoutedTokens":
        """Return the tokens of a batch; `tp` are the tensor-parallel ranks if sequence parallelism divides the tokens
        among them."""
        is_token, groups = batch.is_token, [group for group in (cp, tp) if group is not None and group.size() > 1]
        if tp is not None:
            is_token = is_token.chunk(tp.size())[tp.rank()]
        return cls(is_token, batch.num_tokens, batch.num_loss_tokens, groups)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor without gradient, summed over all ranks that hold different tokens of the bin."""
        for group in self.sharers:
            dist.all_reduce(x, group=group)
        return x
