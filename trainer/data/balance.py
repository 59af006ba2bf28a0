"""How ranks divide work: the images of a micro batch, and the bins of a global batch.

Everything here is a pure function of the plan and of the model's sizes. Ranks do not communicate about it: each
computes the whole answer by itself, in additions and comparisons of doubles, which are the same on every host.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataset_builders.contracts.bins import BinSums
from trainer.model.shape import Work

# Ranks whose totals differ by less than this fraction count as equal: a cost model is not more exact.
TOLERANCE = 1e-3


def spread_images(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """The image numbers of each rank, ascending; a rank may get none.

    The images of one micro batch are dealt by patches: the largest first, each to the least loaded rank. Ties go to the
    lower image number and the lower rank.

    Args:
        patches: patches of each image.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for image in sorted(range(len(patches)), key=lambda i: -patches[i]):
        load, rank = loads[0]
        shares[rank].append(image)
        heapq.heapreplace(loads, (load + patches[image], rank))
    return [sorted(share) for share in shares]


def planned_work(sums: BinSums, seq_len: int) -> Work:
    """The work of bins as far as the plan knows it.

    Every bin is padded to `seq_len`, so it has so many tokens; attention is within each sample. The plan knows the
    number of a sample's patches and images, not the single images: they count as equally large, which is exact for one
    image and too little for unequal ones.
    """
    return Work(seq_len, sums.num_loss_tokens, sums.tokens_squared, sums.num_patches, sums.patches_squared)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Forward and backward cost of one unit of each kind of `Work`, one field per kind.

    They are FLOPs by the model's formulas, see `cost_model` in trainer/data/flops.py. Bins are only compared with
    bins, so the unit does not matter, and neither does `per_token`: every bin has seq_len tokens.
    """

    per_token: float
    per_loss_token: float
    per_token_squared: float
    per_patch: float
    per_patch_squared: float

    def language(self, work: Work) -> float | np.ndarray:
        """Cost of the language model."""
        linear = self.per_token * work.tokens + self.per_loss_token * work.loss_tokens
        return linear + self.per_token_squared * work.tokens_squared

    def vision(self, work: Work) -> float | np.ndarray:
        """Cost of the vision encoder."""
        return self.per_patch * work.patches + self.per_patch_squared * work.patches_squared

    def without_vision(self) -> "CostModel":
        """Of a training that reads features: its ranks encode nothing."""
        return dataclasses.replace(self, per_patch=0, per_patch_squared=0)

    def planned_cost(self, sums: BinSums, seq_len: int) -> float | np.ndarray:
        """Cost of a bin, or (m,) of m bins, from the plan alone."""
        work = planned_work(sums, seq_len)
        return self.language(work) + self.vision(work)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The bins of one global batch dealt to data-parallel ranks, the same number to each.

    Ranks wait for each other once per step, so their totals are made equal; under FSDP they wait at every micro batch,
    so the m-th bins of all ranks, a slot, are made alike. Sorted by cost and cut every `ranks` bins, the sum of the
    slots' costliest bins is the smallest possible. Slots whose bins differ most come first; in a slot the costliest bin
    goes to the rank with the smallest total so far. Then bins of the costliest rank are swapped for cheaper ones until
    totals agree within TOLERANCE.

    Each rank's costliest bin comes first: a bin that is too large for the memory fails at the first micro batch rather
    than somewhere in the step, and the allocator has its largest blocks before the smaller ones are needed.

    Args:
        costs: of each bin; ties are broken by number.

    Returns:
        places in `costs`, one list per rank, in the order to run them.

    Raises:
        ValueError: the bins do not divide among the ranks.
    """
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} bins cannot be dealt evenly to {ranks} ranks")
    falling = sorted(range(len(costs)), key=lambda i: -costs[i])
    slots = [falling[start : start + ranks] for start in range(0, len(falling), ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for slot in sorted(slots, key=lambda s: costs[s[-1]] - costs[s[0]]):
        for number, rank in zip(slot, sorted(range(ranks), key=totals.__getitem__)):
            shares[rank].append(number)
            totals[rank] += costs[number]
    shares = _swap(np.array(shares, np.int64), np.asarray(costs, np.float64)).tolist()
    return [sorted(share, key=lambda i: (-costs[i], i)) for share in shares]


def _swap(shares: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """(ranks, slots) bins after swaps, of which each lowers the costliest rank's total as far as one swap can."""
    each = costs[shares]
    totals = np.array([sum(row) for row in each.tolist()])
    enough = (1 + TOLERANCE) * sum(totals.tolist()) / len(totals)
    while True:
        worst = int(totals.argmax())
        if totals[worst] <= enough:
            return shares
        gain = each[worst][:, None, None] - each  # (slots of the worst, ranks, slots)
        after = np.maximum(totals[worst] - gain, totals[:, None] + gain)
        mine, rank, theirs = np.unravel_index(after.argmin(), after.shape)
        # The factor prevents that rounding swaps the same two bins for ever.
        if after[mine, rank, theirs] >= totals[worst] * (1 - 1e-12):
            return shares
        for table in (shares, each):
            table[worst, mine], table[rank, theirs] = table[rank, theirs], table[worst, mine]
        for changed in (worst, rank):
            totals[changed] = sum(each[changed].tolist())
