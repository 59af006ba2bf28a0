"""Which samples share a bin: lengths in two dimensions and a count of images -> a bin number for each sample."""

import heapq
from fractions import Fraction

import numpy as np

_SMALL = 8  # a sample is small when this many fit into a bin
_TRIES = 16  # bins that are looked at when they have room in two dimensions and not in the third
_SPARE = 0.3  # fillers over what the gaps hold
_RESERVE = 0.6  # a run leaves room for a filler of this quantile of sizes


def pack(
    tokens: np.ndarray,
    patches: np.ndarray,
    seq_len: int,
    max_patches: int,
    images: np.ndarray | None = None,
    max_images: int | None = None,
) -> np.ndarray:
    """Put samples into few bins; a pure function of its arguments, the same on every machine.

    In the scarcer of the two dimensions:

    1. large samples by best fit, decreasing: each goes into the bin that it leaves least room in;
    2. small ones run into bin after bin in shuffled order, from two streams, with more and with fewer of the other
       dimension, so that every bin gets its share of both; a run ends short of the bin's end;
    3. the rest of the small ones, somewhat more than that leaves room for, fill the gaps by best fit, decreasing.

    By best fit alone samples of one length, hence of one kind, meet: steps that are all captions or all documents.

    Args:
        tokens: (n,) integers in [1, seq_len].
        patches: (n,) integers in [0, max_patches].
        images: (n,) integers in [0, max_images]; looked at where there is a `max_images`.

    Returns:
        (n,) int32: the bin of each sample; numbers start at 0 and leave no gap.
    """
    if not len(tokens):
        return np.zeros(0, np.int32)
    dimensions = [_Dimension("tokens", tokens, seq_len), _Dimension("patches", patches, max_patches)]
    if max_images is None:
        dimensions.append(_Dimension("images", np.zeros(len(tokens), np.int64), 1))
    else:
        dimensions.append(_Dimension("images", images, max_images))
    return _Packing(*sorted(dimensions, key=lambda d: Fraction(d.total, d.room), reverse=True)).bins()


class _Dimension:
    """Sizes of all samples in one dimension, and a bin's room; in units of what all sizes are multiples of."""

    def __init__(self, name: str, sizes: np.ndarray, room: int) -> None:
        # pad_multiple makes tokens share a divisor and patches come in fours: that many fewer levels of room
        unit = max(int(np.gcd.reduce(sizes)), 1)
        self.name, self.sizes, self.room = name, np.asarray(sizes // unit, np.int64), room // unit
        self.total = int(self.sizes.sum())


class _Packing:
    """Bins while they are filled, and what each has left: [scarce, other, third]."""

    def __init__(self, scarce: _Dimension, other: _Dimension, third: _Dimension) -> None:
        self.scarce, self.other, self.third = scarce.sizes, other.sizes, third.sizes
        self.room, self.total, self.other_total = scarce.room, scarce.total, other.total
        self.empty = (scarce.room, other.room, third.room)
        self.left: list[list[int]] = []
        self.found = np.full(len(self.scarce), -1, np.int32)

    def bins(self) -> np.ndarray:
        """The bin of each sample."""
        is_small = self.scarce <= self.room // _SMALL
        shuffled = np.random.RandomState(0).permutation(len(self.scarce))  # this generator's stream never changes
        small = shuffled[is_small[shuffled]]
        self._best_fit(shuffled[~is_small[shuffled]])
        self._run(small)
        self._best_fit(small[self.found[small] < 0])
        return self.found

    def _best_fit(self, samples: np.ndarray) -> None:
        """Each into the bin that it leaves least room in, out of those with room in every dimension; large ones first,
        equally large ones in the order given."""
        samples = samples[np.lexsort((-self.other[samples], -self.scarce[samples]))]
        levels = _Levels(self.room, self.empty[2] // _SMALL)
        for number, left in enumerate(self.left):
            levels.push(number, left)
        found = []
        for size in zip(*(a[samples].tolist() for a in (self.scarce, self.other, self.third))):
            number = levels.pop(size, self.left)
            if number is None:
                number = len(self.left)
                self.left.append(list(self.empty))
            left = self.left[number]
            left[0], left[1], left[2] = left[0] - size[0], left[1] - size[1], left[2] - size[2]
            levels.push(number, left)
            found.append(number)
        self.found[samples] = found

    def _run(self, samples: np.ndarray) -> None:
        """Samples as they come into bin after bin, each once; the rest stays to fill the gaps."""
        sizes = np.sort(self.scarce[samples][self.scarce[samples] > 0])
        missing = int(sizes.sum()) - sum(left[0] for left in self.left)
        if missing <= 0 or not len(sizes):
            return
        reserve = int(sizes[int(_RESERVE * (len(sizes) - 1))])
        num_bins = len(self.left) + missing / self.room
        num_new = int((missing - _SPARE * reserve * num_bins) / self.room)
        if num_new <= 0:
            return
        self.left += [list(self.empty) for _ in range(num_new)]
        is_rich = self.other[samples] * self.total > self.scarce[samples] * self.other_total
        streams = [_Stream(self, samples[is_rich]), _Stream(self, samples[~is_rich])]
        for number in range(len(self.left)):
            self._run_into(number, streams, reserve)
        for stream in streams:
            self.found[stream.samples[: stream.at]] = stream.found

    def _run_into(self, number: int, streams: list["_Stream"], reserve: int) -> None:
        left = self.left[number]
        scarce, other, third = left[0] - reserve, left[1], left[2]
        # Over what a bin of the average make-up would have of the other dimension by now: then from the poorer stream.
        balance = (self.empty[1] - other) * self.total - (self.room - left[0]) * self.other_total
        while True:
            for stream in streams[::-1] if balance > 0 else streams:
                at = stream.at
                is_room = at < stream.end and stream.scarce[at] <= scarce and stream.other[at] <= other
                if is_room and stream.third[at] <= third:
                    break
            else:
                left[0], left[1], left[2] = scarce + reserve, other, third
                return
            scarce, other, third = scarce - stream.scarce[at], other - stream.other[at], third - stream.third[at]
            balance += stream.other[at] * self.total - stream.scarce[at] * self.other_total
            stream.at = at + 1
            stream.found.append(number)


class _Stream:
    """Samples in a fixed order, and how far they are used up."""

    def __init__(self, packing: _Packing, samples: np.ndarray) -> None:
        self.samples, self.at, self.end = samples, 0, len(samples)
        self.scarce, self.other = packing.scarce[samples].tolist(), packing.other[samples].tolist()
        self.third = packing.third[samples].tolist()
        self.found: list[int] = []


class _Levels:
    """Bins by what they have left in the scarce dimension: a heap of (-left in the other, bin) for each amount, and
    beside the heaps the most that any bin of a level has left in the other, -1 where there is no bin."""

    def __init__(self, room: int, little: int) -> None:
        self._little = little  # of the third dimension: a bin that has no more and refuses a sample is closed
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(room + 1)]
        self._most = np.full(room + 1, -1, np.int64)

    def push(self, number: int, left: list[int]) -> None:
        """Put a bin where it belongs."""
        heap = self._heaps[left[0]]
        heapq.heappush(heap, (-left[1], number))
        self._most[left[0]] = -heap[0][0]

    def pop(self, size: tuple[int, int, int], left: list[list[int]]) -> int | None:
        """The bin with the least room that takes the sample, removed; None where there is none."""
        level = size[0]
        for _ in range(_TRIES):
            level = _first_at_least(self._most, level, size[1])
            if level < 0:
                return None
            number = self._heaps[level][0][1]
            if left[number][2] >= size[2]:
                self._pop(level)
                return number
            if left[number][2] <= self._little:
                self._pop(level)
            else:
                level += 1
        return None

    def _pop(self, level: int) -> None:
        heap = self._heaps[level]
        heapq.heappop(heap)
        self._most[level] = -heap[0][0] if heap else -1


def _first_at_least(most: np.ndarray, start: int, value: int) -> int:
    """The first place from `start` on where `most` is at least `value`, or -1; near places are looked at first."""
    width = 64
    while start < len(most):
        found = most[start : start + width] >= value
        place = int(found.argmax())
        if found[place]:
            return start + place
        start, width = start + width, width * 8
    return -1
