"""(step, dp_rank) -> bins -> TokenizedSamples -> MicroBatch, read ahead by a thread.

The n-th global batch is a pure function of (bins, seed, n): the same on 1 rank or 64, fresh or resumed.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dataset_builders.contracts.bins import Bin, read_bins
from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import PATCHES, PatchFormat, TokenizedSample, from_fields
from trainer.balance import deal
from trainer.batch import Geometry, MicroBatch, make_micro_batch
from trainer.slices import RankSlice

PREFETCH_DEPTH = 4  # micro batches read ahead


def bins_for_step(num_bins: int, *, seed: int, step: int, global_batch_size: int) -> list[int]:
    """Numbers of the bins of one global batch.

    Epoch after epoch, each a permutation of its own, is one endless list, and step n takes the n-th piece of it:
    every bin is seen once an epoch, and no bin is left out where the global batch does not divide the epoch.
    """
    first = step * global_batch_size
    epochs = range(first // num_bins, (first + global_batch_size - 1) // num_bins + 1)
    order = np.concatenate([_epoch_order(num_bins, seed, epoch) for epoch in epochs])
    offset = first - epochs[0] * num_bins
    return order[offset : offset + global_batch_size].tolist()


@functools.lru_cache(maxsize=8)
def _epoch_order(num_bins: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_bins)


class BinReader:
    """Reads a rank's part of the bins of one split as micro batches."""

    def __init__(
        self, tokenized_dir: Path, bins_dir: Path, split: Split, geometry: Geometry, seq_len: int, part: RankSlice
    ) -> None:
        self.bins: list[Bin] = read_bins(bins_dir, split)
        self.patch_format = PatchFormat.model_validate(load_manifest(tokenized_dir).stats["patch_format"])
        self._dir, self._geometry = tokenized_dir, geometry
        self._seq_len, self._part = seq_len, part

    def samples(self, number: int) -> list[TokenizedSample]:
        """The samples of one bin, in order; without their pixels where this rank encodes none."""
        without = () if self._part.has_vision else (PATCHES,)
        return [
            from_fields(ref.key, read_record(self._dir / ref.shard, ref.offset, ref.size, without), self.patch_format)
            for ref in self.bins[number]
        ]

    def read(self, number: int | None) -> MicroBatch:
        """This rank's part of one bin; None gives a bin of nothing but padding."""
        samples = [] if number is None else self.samples(number)
        return make_micro_batch(samples, self._geometry, self._seq_len, self._part)

    def keys(self, numbers: list[int]) -> list[str]:
        """The sample keys of several bins."""
        return [ref.key for number in numbers for ref in self.bins[number]]


class TrainingOrder:
    """The micro batches of a data-parallel rank, step after step, from any step on.

    Args:
        bin_cost: what a bin costs; the bins of a global batch are then dealt so that ranks and micro batches cost
            alike. Without it they are dealt like cards. It must say the same on every rank.
    """

    def __init__(
        self,
        reader: BinReader,
        *,
        seed: int,
        global_batch_size: int,
        dp_rank: int,
        dp: int,
        bin_cost: Callable[[Bin], float] | None = None,
    ) -> None:
        if not reader.bins:
            raise ValueError("the plan holds no training bin")
        self.reader = reader
        self._seed, self._size, self._dp_rank, self._dp = seed, global_batch_size, dp_rank, dp
        self._bin_cost = bin_cost

    def global_batch(self, step: int) -> list[int]:
        """Bins of all ranks at `step`."""
        return bins_for_step(len(self.reader.bins), seed=self._seed, step=step, global_batch_size=self._size)

    def epoch(self, step: int) -> float:
        """Passes over the bins when `step` steps are done."""
        return step * self._size / len(self.reader.bins)

    def __call__(self, start: int, stop: int) -> Iterator[int]:
        for step in range(start, stop):
            yield from self._share(self.global_batch(step))

    def _share(self, numbers: list[int]) -> list[int]:
        """This rank's part of a global batch."""
        if self._bin_cost is None:
            return numbers[self._dp_rank :: self._dp]
        costs = [self._bin_cost(self.reader.bins[number]) for number in numbers]
        return [numbers[place] for place in deal(costs, self._dp)[self._dp_rank]]


def prefetch(reader: BinReader, numbers: Iterator[int | None], depth: int, pin: bool) -> Iterator[MicroBatch]:
    """Micro batches of these bins, in order, up to `depth` read ahead; an error of the reader is raised here."""
    stopping = threading.Event()

    def load(number: int | None) -> MicroBatch | None:
        if stopping.is_set():
            return None
        batch = reader.read(number)
        return batch.pin_memory() if pin else batch

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="bins") as pool:
        queue: list[Future] = []
        try:
            for number in numbers:
                queue.append(pool.submit(load, number))
                if len(queue) > depth:
                    yield queue.pop(0).result()
            while queue:
                yield queue.pop(0).result()
        finally:
            stopping.set()
