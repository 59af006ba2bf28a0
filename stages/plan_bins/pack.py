"""The packing algorithm: lengths in two dimensions and image counts -> the bin of each sample."""

import heapq
from fractions import Fraction

import numpy as np

_SMALL = 8  # a sample is small if this number of its size fits into a bin
_TRIES = 16  # bins to try that may have room in two dimensions but not in the third
_SPARE = 0.3  # fillers beyond the room in the gaps, as a share
_RESERVE = 0.6  # a run leaves room for a filler of this quantile of the sizes


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

    1. Large samples are placed by best fit, decreasing: each into the bin where it leaves the least room.
    2. Small samples fill bin after bin in shuffled order. They come from two streams, with more and with less of the
       other dimension, so that every bin gets its share of both. A run stops before the bin is full.
    3. The remaining small samples, somewhat more than the gaps hold, fill the gaps by best fit, decreasing.

    Best fit for all samples would put samples of one length, hence of one kind, together: steps would be all captions
    or all documents.

    Args:
        tokens: (n,) integers in [1, seq_len].
        patches: (n,) integers in [0, max_patches].
        images: (n,) integers in [0, max_images]; ignored without `max_images`.

    Returns:
        (n,) int32: the bin of each sample; bin numbers start at 0 without a gap.
    """
    if not len(tokens):
        return np.zeros(0, np.int32)
    if max_images is None:
        images, max_images = np.zeros(len(tokens), np.int64), 1
    dimensions = [_Dimension(tokens, seq_len), _Dimension(patches, max_patches), _Dimension(images, max_images)]
    return _Packing(*sorted(dimensions, key=lambda d: Fraction(d.total, d.room), reverse=True)).bins()


class _Dimension:
    """The sizes of all samples in one dimension, and a bin's room, in units of the sizes' greatest common divisor."""

    def __init__(self, sizes: np.ndarray, room: int) -> None:
        # pad_multiple gives tokens a common divisor, and patches come in fours: dividing reduces the number of levels
        unit = max(int(np.gcd.reduce(sizes)), 1)
        self.sizes, self.room = np.asarray(sizes // unit, np.int64), room // unit
        self.total = int(self.sizes.sum())


class _Packing:
    """The bins while they are filled, and the room left in each: [scarce, other, third]."""

    def __init__(self, scarce: _Dimension, other: _Dimension, third: _Dimension) -> None:
        self.scarce, self.other, self.third = scarce.sizes, other.sizes, third.sizes
        self.room, self.total, self.other_total = scarce.room, scarce.total, other.total
        self.empty = (scarce.room, other.room, third.room)
        self.room_left: list[list[int]] = []
        self.bin_of = np.full(len(self.scarce), -1, np.int32)

    def bins(self) -> np.ndarray:
        is_small = self.scarce <= self.room // _SMALL
        shuffled = np.random.RandomState(0).permutation(len(self.scarce))  # its stream never changes
        small = shuffled[is_small[shuffled]]
        self._best_fit(shuffled[~is_small[shuffled]])
        self._run(small)
        self._best_fit(small[self.bin_of[small] < 0])
        return self.bin_of

    def _best_fit(self, samples: np.ndarray) -> None:
        """Put each sample into the bin where it leaves the least room, among the bins with room in every dimension;
        large samples first, equally large ones in the given order."""
        samples = samples[np.lexsort((-self.other[samples], -self.scarce[samples]))]
        levels = _Levels(self.room, self.empty[2] // _SMALL)
        for number, room in enumerate(self.room_left):
            levels.push(number, room)
        bins = []
        for size in zip(*(a[samples].tolist() for a in (self.scarce, self.other, self.third))):
            number = levels.pop(size, self.room_left)
            if number is None:
                number = len(self.room_left)
                self.room_left.append(list(self.empty))
            room = self.room_left[number]
            room[0], room[1], room[2] = room[0] - size[0], room[1] - size[1], room[2] - size[2]
            levels.push(number, room)
            bins.append(number)
        self.bin_of[samples] = bins

    def _run(self, samples: np.ndarray) -> None:
        """Fill bin after bin with samples in the given order; the remaining samples are left for the gaps."""
        sizes = np.sort(self.scarce[samples][self.scarce[samples] > 0])
        missing = int(sizes.sum()) - sum(room[0] for room in self.room_left)
        if missing <= 0 or not len(sizes):
            return
        reserve = int(sizes[int(_RESERVE * (len(sizes) - 1))])
        num_bins = len(self.room_left) + missing / self.room
        num_new = int((missing - _SPARE * reserve * num_bins) / self.room)
        if num_new <= 0:
            return
        self.room_left += [list(self.empty) for _ in range(num_new)]
        is_rich = self.other[samples] * self.total > self.scarce[samples] * self.other_total
        streams = [_Stream(self, samples[is_rich]), _Stream(self, samples[~is_rich])]
        for number in range(len(self.room_left)):
            self._run_into(number, streams, reserve)
        for stream in streams:
            self.bin_of[stream.samples[: stream.at]] = stream.bins

    def _run_into(self, number: int, streams: list["_Stream"], reserve: int) -> None:
        room = self.room_left[number]
        scarce, other, third = room[0] - reserve, room[1], room[2]
        # Above 0 if the bin's ratio of other to scarce is above average: then use the poorer stream.
        balance = (self.empty[1] - other) * self.total - (self.room - room[0]) * self.other_total
        while True:
            for stream in streams[::-1] if balance > 0 else streams:
                at = stream.at
                is_room = at < stream.end and stream.scarce[at] <= scarce and stream.other[at] <= other
                if is_room and stream.third[at] <= third:
                    break
            else:
                room[0], room[1], room[2] = scarce + reserve, other, third
                return
            scarce, other, third = scarce - stream.scarce[at], other - stream.other[at], third - stream.third[at]
            balance += stream.other[at] * self.total - stream.scarce[at] * self.other_total
            stream.at = at + 1
            stream.bins.append(number)


class _Stream:
    """Samples in a fixed order, the number of used samples, and the bins of the used samples."""

    def __init__(self, packing: _Packing, samples: np.ndarray) -> None:
        self.samples, self.at, self.end = samples, 0, len(samples)
        self.scarce, self.other = packing.scarce[samples].tolist(), packing.other[samples].tolist()
        self.third = packing.third[samples].tolist()
        self.bins: list[int] = []


class _Levels:
    """Bins sorted by their room in the scarce dimension. Each amount of room has a heap of (-room in the other
    dimension, bin), and the largest room in the other dimension among its bins, -1 if there is no bin."""

    def __init__(self, room: int, little: int) -> None:
        self._little = little  # room in the third dimension at or below which a bin that refuses a sample is closed
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(room + 1)]
        self._most = np.full(room + 1, -1, np.int64)

    def push(self, number: int, room: list[int]) -> None:
        """Insert a bin at the level of its room."""
        heap = self._heaps[room[0]]
        heapq.heappush(heap, (-room[1], number))
        self._most[room[0]] = -heap[0][0]

    def pop(self, size: tuple[int, int, int], room_left: list[list[int]]) -> int | None:
        """Remove and return the bin with the least room that takes the sample; None if no bin takes it."""
        level = size[0]
        for _ in range(_TRIES):
            level = _first_at_least(self._most, level, size[1])
            if level < 0:
                return None
            number = self._heaps[level][0][1]
            if room_left[number][2] >= size[2]:
                self._pop(level)
                return number
            if room_left[number][2] <= self._little:
                self._pop(level)
            else:
                level += 1
        return None

    def _pop(self, level: int) -> None:
        heap = self._heaps[level]
        heapq.heappop(heap)
        self._most[level] = -heap[0][0] if heap else -1


def _first_at_least(most: np.ndarray, start: int, value: int) -> int:
    """Return the first index from `start` on where `most` is at least `value`, or -1; the window grows."""
    width = 64
    while start < len(most):
        has_room = most[start : start + width] >= value
        place = int(has_room.argmax())
        if has_room[place]:
            return start + place
        start, width = start + width, width * 8
    return -1
