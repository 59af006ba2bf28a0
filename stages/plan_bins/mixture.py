"""The number of copies of each sample in each epoch, from shares, repeats and caps, computed sample by sample.

A sample's position in its subset is a keyed permutation of its rank in the subset. The used samples in order of
position, repeated without end, form one sequence; epoch e takes the e-th piece of it. So the samples of an epoch need
no stored list, they do not depend on the partitions, and the samples that one epoch leaves out come first in the next.
"""

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dataset_builders.contracts.bins import KeyedPermutation
from dataset_builders.errors import InputError
from stages.plan_bins.config import SubsetMix


@dataclass(frozen=True, slots=True)
class SubsetSize:
    """The size of a subset: the number of samples that fit a bin, and of their tokens."""

    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SubsetDraw:
    """The samples that an epoch takes from a subset."""

    subset: str  # the name, which is the key of its permutation
    num_samples: int  # samples that fit a bin
    num_used: int  # of these, the samples that all epochs together use
    per_epoch: int  # samples per epoch, including repeats

    @property
    def is_the_same_each_epoch(self) -> bool:
        return self.per_epoch % self.num_used == 0

    def copies(self, ranks: np.ndarray, epoch: int) -> np.ndarray:
        """Return (m,) int64: the number of copies of each sample in an epoch. `ranks` are (m,) its index among the
        subset's samples that fit, in index order."""
        if self.num_used == self.num_samples and self.is_the_same_each_epoch:
            return np.full(len(ranks), self.per_epoch // self.num_used)
        places = KeyedPermutation(self.num_samples, ["mixture", self.subset])(ranks)
        start, end = epoch * self.per_epoch, (epoch + 1) * self.per_epoch
        # The number of t in [start, end) at this position of the sequence: t = position modulo num_used.
        times = (end - places - 1) // self.num_used - (start - places - 1) // self.num_used
        return np.where(places < self.num_used, times, 0)


def with_shares(
    mixture: Mapping[str, SubsetMix], shares: Mapping[str, float], sizes: Mapping[str, SubsetSize]
) -> dict[str, SubsetMix]:
    """Return the mixture with a weight, proportional to its tokens, for every subset of a source that has a share.

    `shares`: name of a source, which is the prefix of its subsets' names -> its share of an epoch's tokens.
    """
    mixed = dict(mixture)
    for source, share in shares.items():
        members = [name for name in sizes if name.partition("_")[0] == source]
        if not members:
            raise InputError(f"data: the source {source} has a share, and no training sample of it fits a bin")
        if named := [name for name in members if name in mixture]:
            raise InputError(
                f"plan_bins.mixture.{named[0]}: its source {source} has a share in data; remove one of them"
            )
        total = sum(sizes[name].num_tokens for name in members)
        mixed |= {name: SubsetMix(weight=share * sizes[name].num_tokens / total) for name in members}
    return mixed


def make_draws(mixture: Mapping[str, SubsetMix], sizes: Mapping[str, SubsetSize]) -> dict[str, SubsetDraw]:
    """Return name -> draw, for every subset. A subset without an entry is taken completely, once."""
    for name in mixture:
        if name not in sizes:
            near = difflib.get_close_matches(name, sizes, n=1, cutoff=0)
            raise InputError(
                f"plan_bins.mixture.{name}: no subset of that name has a training sample that fits a bin; "
                + (f"did you mean {near[0]}?" if near else "there is none at all")
            )
    draws, means, weights = {}, {}, {}
    for name, size in sorted(sizes.items()):
        mix = mixture.get(name, SubsetMix())
        used = max(round(mix.fraction * size.num_samples), 1)
        count = max(round(mix.repeats * used), 1)
        draws[name] = SubsetDraw(name, size.num_samples, used, min(count, mix.max_samples or count))
        if mix.weight is not None:
            means[name], weights[name] = size.num_tokens / size.num_samples, mix.weight
    if weights:
        # The scarcest weighted subset for its weight is taken as often as its repeats and its cap allow. The others
        # follow in proportion, counted in tokens by each subset's mean.
        tokens = min(draws[name].per_epoch * means[name] / weights[name] for name in weights)  # tokens for weight 1
        for name, weight in weights.items():
            count = min(max(round(tokens * weight / means[name]), 1), draws[name].per_epoch)
            draws[name] = replace(draws[name], per_epoch=count)
    return draws


def count_epochs(epochs: int, draws: Mapping[str, SubsetDraw]) -> int:
    """Return the number of epochs that need a plan of their own: one if all would be the same."""
    return 1 if all(draw.is_the_same_each_epoch for draw in draws.values()) else epochs


def draw_samples(
    draws: Mapping[str, SubsetDraw], first_ranks: Mapping[str, int], subsets: np.ndarray, names: list[str], epoch: int
) -> np.ndarray:
    """Return (n,) int64: the number of copies of each sample of a partition in an epoch.

    Args:
        first_ranks: subset -> number of its samples in earlier partitions.
        subsets: (n,) number of each sample's subset in `names`, in index order.
    """
    copies = np.zeros(len(subsets), np.int64)
    for number, name in enumerate(names):
        rows = np.flatnonzero(subsets == number)
        if len(rows):
            copies[rows] = draws[name].copies(first_ranks[name] + np.arange(len(rows)), epoch)
    return copies


def part_copies(bins: np.ndarray, samples: np.ndarray, sizes: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, int]:
    """Swap copies between bins so that, as far as possible, a sample appears once in a bin.

    Args:
        bins: (n,) the bin of each copy.
        samples: (n,) number of each copy's sample.
        sizes: (n, d) size of each copy in each dimension.
        room: (d,) capacity of a bin in each dimension.

    Returns:
        (n,) bins, and the number of copies that still share a bin with another copy of the same sample.
    """
    order = np.lexsort((samples, bins))
    is_second = (np.diff(bins[order]) == 0) & (np.diff(samples[order]) == 0)
    seconds = np.sort(order[1:][is_second])
    if not len(seconds):
        return bins, 0
    swaps = _Swaps(bins.copy(), samples, sizes, room)
    together = sum(not swaps.move(int(copy)) for copy in seconds)
    return swaps.bins, together


class _Swaps:
    """The state of the bins while copies are swapped."""

    _NEIGHBOURS = 256  # neighbours in size, on each side

    def __init__(self, bins: np.ndarray, samples: np.ndarray, sizes: np.ndarray, room: np.ndarray) -> None:
        self.bins, self._samples, self._sizes, self._room = bins, samples, sizes, room
        self._loads = np.zeros((int(bins.max()) + 1, sizes.shape[1]), np.int64)
        np.add.at(self._loads, bins, sizes)
        self._by_size = np.lexsort(sizes.T[::-1])
        self._place = np.empty(len(bins), np.int64)
        self._place[self._by_size] = np.arange(len(bins))
        self._copies = Counter(zip(bins.tolist(), samples.tolist()))  # (bin, sample) -> number of copies

    def move(self, copy: int) -> bool:
        """Swap one copy out of its bin; return False if no swap fits."""
        place = int(self._place[copy])
        near = self._by_size[max(place - self._NEIGHBOURS, 0) : place + self._NEIGHBOURS]
        own_bin, bins = int(self.bins[copy]), self.bins[near]
        change = self._sizes[near] - self._sizes[copy]
        fits = (self._loads[own_bin] + change <= self._room).all(1) & (self._loads[bins] - change <= self._room).all(1)
        fits &= bins != own_bin
        candidates = near[fits]
        sample = int(self._samples[copy])
        # The nearest in size first. Neither bin may get a second copy of a sample.
        for other in candidates[np.argsort(np.abs(self._place[candidates] - place), kind="stable")].tolist():
            if not (self._copies[own_bin, int(self._samples[other])] or self._copies[int(self.bins[other]), sample]):
                self._swap(copy, other)
                return True
        return False

    def _swap(self, copy: int, other: int) -> None:
        own_bin, other_bin = int(self.bins[copy]), int(self.bins[other])
        change = self._sizes[other] - self._sizes[copy]
        self._loads[own_bin] += change
        self._loads[other_bin] -= change
        for number, old_bin, new_bin in ((copy, own_bin, other_bin), (other, other_bin, own_bin)):
            sample = int(self._samples[number])
            self._copies[old_bin, sample] -= 1
            self._copies[new_bin, sample] += 1
            self.bins[number] = new_bin
