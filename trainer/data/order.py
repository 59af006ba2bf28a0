"""The order of training: which bins each data-parallel rank computes at each step.

The n-th global batch is a pure function of (plan, seed, n): it is the same on 1 rank or 64, fresh or resumed. No epoch
is ever whole in memory: the order of bins is computed index by index, and a plan is read bin by bin.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dataset_builders.contracts.bins import BinSums, KeyedPermutation
from trainer.data.balance import deal
from trainer.data.reader import BinReader

_RANKS_OF_GROUP = 64  # most ranks among which bins are assigned by cost; more ranks form groups with their own bins
_SUMMED_BINS = 1 << 18  # bins whose sums are in memory at a time


def bins_at(epoch_sizes: Sequence[int], seed: int, places: np.ndarray) -> np.ndarray:
    """Return the (m,) int64 bins at (m,) int64 indices of the order of training.

    The order is one endless list of epochs. Each epoch is its own permutation, so that every bin is seen once per
    epoch. After the last planned epoch the first one follows again, in another order.

    Args:
        epoch_sizes: number of bins of each planned epoch; bin indices continue from one epoch to the next.
    """
    ends = np.cumsum(epoch_sizes)
    rounds, rest = np.divmod(places, ends[-1])  # passes over all planned epochs, and the index within the pass
    planned = np.searchsorted(ends, rest, side="right")
    epochs = rounds * len(ends) + planned
    bins = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs).tolist():
        chosen = np.flatnonzero(epochs == epoch)
        number = epoch % len(ends)
        first = int(ends[number]) - epoch_sizes[number]
        bins[chosen] = _epoch_order(epoch_sizes[number], seed, epoch)(rest[chosen] - first) + first
    return bins


def bins_for_step(epoch_sizes: Sequence[int], *, seed: int, step: int, global_batch_size: int) -> list[int]:
    """Return the indices of the bins of one global batch: at step n, the n-th slice of the order of training. No bin is
    left out if the global batch size does not divide the epoch; then a batch may have bins of two epochs."""
    # Leaving out the rest of an epoch would never train on some bins of a small plan.
    first = step * global_batch_size
    return bins_at(epoch_sizes, seed, np.arange(first, first + global_batch_size)).tolist()


@functools.lru_cache(maxsize=8)
def _epoch_order(num_bins: int, seed: int, epoch: int) -> KeyedPermutation:
    return KeyedPermutation(num_bins, [seed, epoch])


class TrainingOrder:
    """The sequence of bins of a data-parallel rank, step by step, from any step on.

    Args:
        bin_cost: returns the costs (m,) of m bins, given their sums; must give the same on every rank. The bins of a
            global batch are assigned so that the costs of ranks and of micro batches are similar. None: round robin.
    """

    def __init__(
        self,
        reader: BinReader,
        *,
        seed: int,
        global_batch_size: int,
        dp_rank: int,
        dp: int,
        bin_cost: Callable[[BinSums], np.ndarray] | None = None,
    ) -> None:
        if not reader.bins:
            raise ValueError("the plan holds no training bin")
        self.reader = reader
        self._sizes = reader.bins.epoch_sizes
        self._seed, self._size, self._dp_rank, self._dp = seed, global_batch_size, dp_rank, dp
        self._bin_cost = bin_cost

    def global_batch(self, step: int) -> list[int]:
        """Return the bins of all ranks at `step`."""
        return bins_for_step(self._sizes, seed=self._seed, step=step, global_batch_size=self._size)

    def epoch(self, step: int) -> float:
        """Return the number of passes over the bins after `step` steps."""
        ends = np.cumsum(self._sizes).tolist()
        rounds, rest = divmod(step * self._size, ends[-1])
        number = bisect.bisect_right(ends, rest)
        return rounds * len(ends) + number + (rest - ends[number] + self._sizes[number]) / self._sizes[number]

    def tokens_before(self, step: int) -> tuple[int, int]:
        """Return (tokens, loss tokens) of the first `step` global batches; only bins of the last epoch are summed."""
        stop = remaining = step * self._size
        totals = np.zeros(2, np.int64)
        # Whole epochs by their totals in the plan, which no permutation changes; the rest bin by bin.
        for epoch in itertools.count():
            size = self._sizes[epoch % len(self._sizes)]
            if remaining < size:
                break
            totals += self.reader.bins.epoch_totals[epoch % len(self._sizes)]
            remaining -= size
        for first in range(stop - remaining, stop, _SUMMED_BINS):
            places = np.arange(first, min(first + _SUMMED_BINS, stop))
            sums = self.reader.bins.sums(bins_at(self._sizes, self._seed, places))
            totals += [int(sums.num_tokens.sum()), int(sums.num_loss_tokens.sum())]
        return int(totals[0]), int(totals[1])

    def __call__(self, start: int, stop: int) -> Iterator[int]:
        """Yield this rank's bins of the steps from `start` to `stop` - 1."""
        for step in range(start, stop):
            yield from self.share(step)

    def share(self, step: int) -> list[int]:
        """Return this rank's bins of the global batch of a step, in the order to run them."""
        first = step * self._size
        if self._bin_cost is None:
            places = np.arange(first + self._dp_rank, first + self._size, self._dp)
            return bins_at(self._sizes, self._seed, places).tolist()
        # Groups bound the work: it grows neither with ranks beyond _RANKS_OF_GROUP nor with the number of bins.
        groups = -(-self._dp // _RANKS_OF_GROUP)
        bounds = [group * self._dp // groups for group in range(groups + 1)]
        group = bisect.bisect_right(bounds, self._dp_rank) - 1
        ranks, each = bounds[group + 1] - bounds[group], self._size // self._dp
        numbers = bins_at(self._sizes, self._seed, first + bounds[group] * each + np.arange(ranks * each))
        # Every rank of the group computes the whole assignment and takes its own part: no message is needed.
        costs = self._bin_cost(self.reader.bins.sums(numbers)).tolist()
        return numbers[deal(costs, ranks)[self._dp_rank - bounds[group]]].tolist()


def heldout_bins(total: int, dp_rank: int, dp: int, multiple: int) -> list[int | None]:
    """Return the bins of a rank, then empty bins (None), the same number on every rank."""
    # Equal, because ranks that divide the weights synchronise in each bin; virtual stages of a pipeline need the
    # multiple.
    per_rank = -(-total // (dp * multiple)) * multiple
    numbers: list[int | None] = list(range(dp_rank, total, dp))
    return numbers + [None] * (per_rank - len(numbers))
