"""Some tokens of a bin, chosen where the others are needed no more.

t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t; D = hidden size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Rows to go on with.

    Attributes:
        index: (m,) int64 places in t.
        sharers: the tensor-parallel ranks, where sequence parallelism divides the tokens among them: of the chosen ones
            each then holds m / tp. None where every rank holds all tokens.
    """

    index: torch.Tensor
    sharers: ProcessGroup | None

    @classmethod
    def of(cls, index: torch.Tensor, sharers: ProcessGroup | None, multiple: int) -> "ChosenRows":
        """`index` (N,), and after it as many rows of no meaning as make their number a multiple of `multiple` on each
        rank; at least one, for matrix products of no rows are not worth a special case in every module."""
        multiple *= 1 if sharers is None else sharers.size()
        wanted = max(1, -(-len(index) // multiple)) * multiple
        return cls(F.pad(index, (0, wanted - len(index))), sharers)

    def of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """(s, 1, D) -> (m, 1, D), or this rank's (m / tp, 1, D)."""
        if self.sharers is None:
            return hidden.index_select(0, self.index)
        whole = gather_from_sequence_parallel_region(hidden, group=self.sharers)
        return whole.index_select(0, self.index.chunk(self.sharers.size())[self.sharers.rank()])

    def of_attended(self, attended: torch.Tensor) -> torch.Tensor:
        """(t, 1, width) of this rank's heads -> (m, 1, width)."""
        return attended.index_select(0, self.index)
