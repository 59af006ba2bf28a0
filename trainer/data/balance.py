"""The division of work among ranks: the images of a micro batch, and the bins of a global batch.

Everything here is a pure function of the plan and of the model's sizes. Ranks do not communicate: each rank computes
the whole result itself, using only additions and comparisons of doubles, which are the same on every host.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataset_builders.contracts.bins import BinSums
from trainer.model.shape import Work

# Ranks whose totals differ by less than this fraction count as equal: the cost model is no more exact than this.
TOLERANCE = 1e-3


def spread_images(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the image indices of each rank, ascending, given the patches of each image; a rank may get none.

    The images of one micro batch are assigned by patches: the largest first, each to the least loaded rank. Ties go to
    the lower image index and the lower rank.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for image in sorted(range(len(patches)), key=lambda i: -patches[i]):
        load, rank = loads[0]
        shares[rank].append(image)
        heapq.heapreplace(loads, (load + patches[image], rank))
    return [sorted(share) for share in shares]


def planned_work(sums: BinSums, seq_len: int) -> Work:
    """Return the work of bins as far as the plan knows it.

    Every bin is padded to `seq_len` tokens; attention is within each sample. The plan knows only how many patches and
    images a sample has, not the size of each image. So images of a sample count as equally large, which is exact for
    one image and for the temporal groups of a video, and an underestimate for unequal images.
    """
    return Work(seq_len, sums.num_loss_tokens, sums.tokens_squared, sums.num_patches, sums.patches_squared)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Forward and backward cost of one unit of each kind of `Work`, one field per kind.

    Costs are FLOPs by the model's formulas, see `cost_model` in trainer/data/flops.py. Bins are only compared with
    each other, so the unit does not matter, and neither does `per_token`: every bin has seq_len tokens.
    """

    per_token: float
    per_loss_token: float
    per_token_squared: float
    per_patch: float
    per_patch_squared: float

    def language(self, work: Work) -> float | np.ndarray:
        linear = self.per_token * work.tokens + self.per_loss_token * work.loss_tokens
        return linear + self.per_token_squared * work.tokens_squared

    def vision(self, work: Work) -> float | np.ndarray:
        return self.per_patch * work.patches + self.per_patch_squared * work.patches_squared

    def without_vision(self) -> "CostModel":
        """Return the cost model of a training that reads features, whose ranks encode no images."""
        return dataclasses.replace(self, per_patch=0, per_patch_squared=0)

    def planned_cost(self, sums: BinSums, seq_len: int) -> float | np.ndarray:
        """Return the cost of a bin, or costs (m,) of m bins, from only the plan."""
        work = planned_work(sums, seq_len)
        return self.language(work) + self.vision(work)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign the bins of one global batch to data-parallel ranks, the same number to each rank.

    Ranks wait for each other once per step, so their total costs should be equal. Under FSDP they wait at every micro
    batch, so the m-th bins of all ranks, called a slot, should also be alike.

    Args:
        costs: cost of each bin; ties are broken by index.

    Returns:
        Indices into `costs`, one list per rank, in the order to run them.
    """
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} bins cannot be dealt evenly to {ranks} ranks")
    falling = sorted(range(len(costs)), key=lambda i: -costs[i])
    # Cut from the sorted bins, so that the sum of the slots' costliest bins is the smallest possible.
    slots = [falling[start : start + ranks] for start in range(0, len(falling), ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    # Slots whose bins differ most come first; in a slot the costliest bin goes to the rank with the smallest total so
    # far.
    for slot in sorted(slots, key=lambda s: costs[s[-1]] - costs[s[0]]):
        for number, rank in zip(slot, sorted(range(ranks), key=totals.__getitem__)):
            shares[rank].append(number)
            totals[rank] += costs[number]
    # Sorting, largest first and differencing stopped at 0.8% (8 ranks) to 1.6% (64) over the mean; swaps take the rest.
    shares = _swap(np.array(shares, np.int64), np.asarray(costs, np.float64)).tolist()
    # The costliest bin runs first: one that does not fit in memory fails at the first micro batch, and the allocator
    # gets its largest blocks before it needs smaller ones.
    return [sorted(share, key=lambda i: (-costs[i], i)) for share in shares]


def _swap(shares: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return (ranks, slots) bins after swaps; each swap lowers the costliest rank's total as much as one swap can."""
    each = costs[shares]
    totals = np.array([sum(row) for row in each.tolist()])
    enough = (1 + TOLERANCE) * sum(totals.tolist()) / len(totals)
    while True:
        worst = int(totals.argmax())
        if totals[worst] <= enough:
            return shares
        gain = each[worst][:, None, None] - each  # (slots of the worst rank, ranks, slots)
        after = np.maximum(totals[worst] - gain, totals[:, None] + gain)
        mine, rank, theirs = np.unravel_index(after.argmin(), after.shape)
        # The factor prevents an endless loop in which rounding swaps the same two bins.
        if after[mine, rank, theirs] >= totals[worst] * (1 - 1e-12):
            return shares
        for table in (shares, each):
            table[worst, mine], table[rank, theirs] = table[rank, theirs], table[worst, mine]
        for changed in (worst, rank):
            totals[changed] = sum(each[changed].tolist())
