"""Who works on what: the images of a micro batch among ranks, the bins of a global batch among data-parallel ranks.

Everything here is a pure function of the plan and of the model's sizes. Ranks never talk about it: each computes the
whole answer by itself, in additions and comparisons of doubles, which give the same on every host.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dataset_builders.contracts.bins import BinSums

# Ranks whose totals differ by less than this fraction wait for no one: a cost model does not know better.
TOLERANCE = 1e-3


def spread_images(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal the images of one micro batch to `ranks` by patches: largest first, each to the least loaded rank.

    Ties go to the lower image number and the lower rank.

    Args:
        patches: patches of each image.

    Returns:
        image numbers of each rank, ascending; a rank may get none.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for image in sorted(range(len(patches)), key=lambda i: -patches[i]):
        load, rank = loads[0]
        shares[rank].append(image)
        heapq.heapreplace(loads, (load + patches[image], rank))
    return [sorted(share) for share in shares]


class Work(NamedTuple):
    """What a bin holds, counted by what it costs; or arrays, of many bins.

    Attributes:
        tokens: that go through the linear layers of the language model.
        loss_tokens: whose logits are computed.
        tokens_squared: sum over samples of length^2; the causal half is the coefficient's business.
        patches: that go through the vision encoder.
        patches_squared: sum over images of patches^2.
    """

    tokens: int
    loss_tokens: int | np.ndarray
    tokens_squared: int | np.ndarray
    patches: int | np.ndarray
    patches_squared: float | np.ndarray


def planned_work(sums: BinSums, seq_len: int) -> Work:
    """The work of bins as far as the plan knows it.

    Every bin is filled up to `seq_len`, so that is what its tokens cost; attention is the samples' own. The plan
    knows patches and images of a sample and no single image: its images count as equally large, which is exact for
    one image and too little for unequal ones.
    """
    return Work(seq_len, sums.num_loss_tokens, sums.tokens_squared, sums.num_patches, sums.patches_squared)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Forward and backward cost of one unit of each kind of `Work`, a field a kind.

    FLOPs by a model's formulas (`cost_model` of its flops.py), or seconds on some hardware by `fit`. Bins are compared
    with bins only, so the unit does not matter, nor does `per_token`, for every bin has seq_len of them.
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

    def planned_cost(self, sums: BinSums, seq_len: int) -> float | np.ndarray:
        """Cost of a bin, or (m,) of m bins, from the plan alone."""
        work = planned_work(sums, seq_len)
        return self.language(work) + self.vision(work)


def fit(works: Sequence[Work], seconds: Sequence[float]) -> CostModel:
    """The cost model that explains measured seconds best: least squares, no coefficient negative.

    To measure: train on one rank with global_batch_size 1 and log_interval 1. Then `step_seconds` in metrics.jsonl is
    one bin's, `bins_for_step` says which, and `planned_work` what is in it. Leave out the first steps, which plan
    kernels. What every bin costs alike, the update too, ends up in `per_token`.

    Raises:
        ValueError: fewer measurements than coefficients.
    """
    names = [field.name for field in dataclasses.fields(CostModel)]
    if len(works) < len(names):
        raise ValueError(f"{len(works)} measured bins cannot tell {len(names)} coefficients; measure more")
    columns = np.array(works, np.float64)
    scale = np.maximum(np.abs(columns).max(0), 1.0)
    # Without its zeros the best non-negative answer is the plain one of its own columns: try all 31 sets of them.
    best, best_error = np.zeros(len(names)), float(np.square(seconds).sum())
    for size in range(1, len(names) + 1):
        for chosen in map(list, itertools.combinations(range(len(names)), size)):
            found = np.linalg.lstsq(columns[:, chosen] / scale[chosen], np.asarray(seconds), rcond=None)[0]
            error = float(np.square(columns[:, chosen] / scale[chosen] @ found - seconds).sum())
            if found.min() >= 0 and error < best_error:
                best, best_error = np.zeros(len(names)), error
                best[chosen] = found / scale[chosen]
    return CostModel(**dict(zip(names, best.tolist())))


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal the bins of one global batch to data-parallel ranks, the same number to each.

    Ranks meet once a step, so their totals are made equal; under FSDP they meet at every micro batch, so the m-th bins
    of all ranks, a slot, are made alike. Sorted by cost and cut every `ranks` bins, the sum of the slots' costliest is
    the least there is. In a slot the costliest bin goes to the rank with the least so far, slots that differ most
    first. Then bins of the costliest rank are swapped for cheaper ones until totals agree within TOLERANCE.

    Each rank's costliest bin comes first: one too large for the memory fails at the first micro batch rather than
    somewhere in the step, and the allocator's largest blocks are there when the smaller ones ask.

    Args:
        costs: of each bin; ties are broken by number.

    Returns:
        places in `costs`, a list a rank, in the order to run them.

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
    """(ranks, slots) bins, better dealt: each swap lowers the costliest rank as far as one swap can."""
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
        # The factor keeps rounding from swapping the same two bins for ever.
        if after[mine, rank, theirs] >= totals[worst] * (1 - 1e-12):
            return shares
        for table in (shares, each):
            table[worst, mine], table[rank, theirs] = table[rank, theirs], table[worst, mine]
        for changed in (worst, rank):
            totals[changed] = sum(each[changed].tolist())
