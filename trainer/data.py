"""(step, dp_rank) -> bins -> TokenizedSamples -> MicroBatch, read ahead by threads.

The n-th global batch is a pure function of (plan, seed, n): the same on 1 rank or 64, fresh or resumed. Nothing here
holds an epoch: an order of bins is computed place by place, and a plan is read bin by bin.
"""

import bisect
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from dataset_builders.contracts.bins import BinPlan, BinSums, read_bins
from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.contracts.permutation import KeyedPermutation
from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.tokenized import TokenizedSample, read_pixel_store
from dataset_builders.pixel_codecs import decode_sample, pixel_fields
from trainer.balance import deal
from trainer.batch import Geometry, MicroBatch, make_micro_batch
from trainer.slices import RankSlice

PREFETCH_DEPTH = 4  # micro batches read ahead
_DEALT_RANKS = 64  # among as many the bins are dealt by cost; more ranks form groups, each with its own piece
_SUMMED_BINS = 1 << 18  # whose sums are in memory at a time


def bins_at(epoch_sizes: Sequence[int], seed: int, places: np.ndarray) -> np.ndarray:
    """Bins at some places of the order of training, which has no end.

    Epoch after epoch, each a permutation of its own, is one endless list: every bin is seen once an epoch. Planned
    epochs come one after the other, and after the last one the first again, in another order.

    Args:
        epoch_sizes: bins of each planned epoch; their numbers follow one another.
        places: (m,) int64.

    Returns:
        (m,) int64 bin numbers.
    """
    ends = np.cumsum(epoch_sizes)
    rounds, rest = np.divmod(places, ends[-1])
    planned = np.searchsorted(ends, rest, side="right")
    epochs = rounds * len(ends) + planned
    found = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs).tolist():
        chosen = np.flatnonzero(epochs == epoch)
        number = epoch % len(ends)
        first = int(ends[number]) - epoch_sizes[number]
        found[chosen] = _epoch_order(epoch_sizes[number], seed, epoch)(rest[chosen] - first) + first
    return found


def bins_for_step(epoch_sizes: Sequence[int], *, seed: int, step: int, global_batch_size: int) -> list[int]:
    """Numbers of the bins of one global batch: the n-th piece of the order of training at step n.

    No bin is left out where the global batch does not divide the epoch; then a batch holds bins of two.
    """
    first = step * global_batch_size
    return bins_at(epoch_sizes, seed, np.arange(first, first + global_batch_size)).tolist()


@functools.lru_cache(maxsize=8)
def _epoch_order(num_bins: int, seed: int, epoch: int) -> KeyedPermutation:
    return KeyedPermutation(num_bins, [seed, epoch])


class BinReader:
    """Reads a rank's part of the bins of one split as micro batches. Safe to use from several threads."""

    def __init__(
        self,
        tokenized_dir: StorePath,
        bins_dir: StorePath,
        split: Split,
        geometry: Geometry,
        seq_len: int,
        part: RankSlice,
    ) -> None:
        self.bins: BinPlan = read_bins(bins_dir, split)
        self.pixels = read_pixel_store(tokenized_dir, load_manifest(tokenized_dir).stats)
        self.patch_format = self.pixels.config.patch_format
        self._dir, self._geometry = tokenized_dir, geometry
        self._seq_len, self._part = seq_len, part

    def samples(self, number: int) -> list[TokenizedSample]:
        """The samples of one bin, in order; without their pixels where this rank encodes none."""
        without = () if self._part.has_vision else pixel_fields(self.pixels.codec)
        samples = []
        for ref in self.bins[number]:
            fields = read_record(self._dir / ref.shard, ref.offset, ref.size, without, ref.checksum)
            samples.append(decode_sample(ref.key, fields, self.pixels))
        return samples

    def read(self, number: int | None) -> MicroBatch:
        """This rank's part of one bin; None gives a bin of nothing but padding.

        Raises:
            InputError: what was tokenized makes no bin; with the directory and the sample.
        """
        samples = [] if number is None else self.samples(number)
        try:
            return make_micro_batch(samples, self._geometry, self._seq_len, self._part)
        except ValueError as error:
            raise InputError(f"{self._dir}: {error}") from error

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """The sample keys of several bins."""
        return [ref.key for number in numbers for ref in self.bins[number]]


class TrainingOrder:
    """The micro batches of a data-parallel rank, step after step, from any step on.

    Args:
        bin_cost: what bins cost, (m,) of their sums; the bins of a global batch are then dealt so that ranks and micro
            batches cost alike. Without it they are dealt like cards. It must say the same on every rank.
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
        """Bins of all ranks at `step`."""
        return bins_for_step(self._sizes, seed=self._seed, step=step, global_batch_size=self._size)

    def epoch(self, step: int) -> float:
        """Passes over the bins when `step` steps are done."""
        ends = np.cumsum(self._sizes).tolist()
        rounds, rest = divmod(step * self._size, ends[-1])
        number = bisect.bisect_right(ends, rest)
        return rounds * len(ends) + number + (rest - ends[number] + self._sizes[number]) / self._sizes[number]

    def tokens_before(self, step: int) -> tuple[int, int]:
        """(tokens, loss tokens) of the first `step` global batches. Whole epochs cost nothing."""
        done = step * self._size
        totals = np.zeros(2, np.int64)
        for epoch in itertools.count():
            size = self._sizes[epoch % len(self._sizes)]
            if done < size:
                break
            totals += self.reader.bins.epoch_totals[epoch % len(self._sizes)]
            done -= size
        start = step * self._size - done
        for first in range(start, start + done, _SUMMED_BINS):
            places = np.arange(first, min(first + _SUMMED_BINS, start + done))
            sums = self.reader.bins.sums(bins_at(self._sizes, self._seed, places))
            totals += [int(sums.num_tokens.sum()), int(sums.num_loss_tokens.sum())]
        return int(totals[0]), int(totals[1])

    def __call__(self, start: int, stop: int) -> Iterator[int]:
        for step in range(start, stop):
            yield from self.share(step)

    def share(self, step: int) -> list[int]:
        """This rank's part of the global batch of a step, in the order to run it; costs as much for any number of
        ranks beyond _DEALT_RANKS and any number of bins."""
        first = step * self._size
        if self._bin_cost is None:
            places = np.arange(first + self._dp_rank, first + self._size, self._dp)
            return bins_at(self._sizes, self._seed, places).tolist()
        groups = -(-self._dp // _DEALT_RANKS)
        bounds = [group * self._dp // groups for group in range(groups + 1)]
        group = bisect.bisect_right(bounds, self._dp_rank) - 1
        ranks, each = bounds[group + 1] - bounds[group], self._size // self._dp
        numbers = bins_at(self._sizes, self._seed, first + bounds[group] * each + np.arange(ranks * each))
        costs = self._bin_cost(self.reader.bins.sums(numbers)).tolist()
        return numbers[deal(costs, ranks)[self._dp_rank - bounds[group]]].tolist()


def prefetch(
    reader: BinReader, numbers: Iterator[int | None], depth: int, pin: bool, num_workers: int = 1
) -> Iterator[MicroBatch]:
    """Micro batches of these bins, in order whatever the number of threads; an error of the reader is raised here, in
    its micro batch's place.

    Args:
        depth: micro batches read ahead, one a thread at least.
        pin: copy them to memory that a GPU reads from directly.
        num_workers: threads that read.
    """
    stopping = threading.Event()

    def load(number: int | None) -> MicroBatch | None:
        if stopping.is_set():
            return None
        batch = reader.read(number)
        return batch.pin_memory() if pin else batch

    with ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="bins") as pool:
        queue: deque[Future] = deque()
        try:
            for number in numbers:
                queue.append(pool.submit(load, number))
                if len(queue) > max(depth, num_workers):
                    yield queue.popleft().result()
            while queue:
                yield queue.popleft().result()
        finally:
            stopping.set()
