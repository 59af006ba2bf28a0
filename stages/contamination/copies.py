"""Held-out images that are copies of train images: the same bytes, the same pixels, or nearly the same image.

Similar hashes and thumbnails find candidates for the last kind, and a second look at the images' own size decides.

The hashes are found without comparing every hash with every other, by multi-index hashing (Norouzi, Punjani, Fleet,
"Fast Search in Hamming Space with Multi-Index Hashing", CVPR 2012): two hashes that differ in at most 7 bits differ in
at most one bit in one of four bands of 16 bits. So every hash is indexed four times, by each of its bands, and a query
searches 4 * 17 of 4 * 65,536 buckets.
"""

import json
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.shard_io import read_record
from dataset_builders.storage.store import StorePath
from stages.contamination.config import MAX_BITS, ContaminationConfig
from stages.contamination.scan import THUMBNAIL_BYTES, PictureTask, count_pictures, read_pictures, read_thumbnails
from stages.contamination.second_look import MAX_GAIN, apart
from stages.shared.artifacts.workers import StageResources, run_tasks

How = Literal["bytes", "pixels", "near"]
HOWS: tuple[How, ...] = ("bytes", "pixels", "near")
_MAX_STRETCH = 1.1  # largest ratio of two copies' aspects; rounding to whole pixels causes a few per cent
# A thumbnail of 32 x 32 shows nearly all that an image with a smaller side shows, so a second look sees no more in it.
_SMALL_SIDE, _MAX_SMALL_DIFFERENCE = 128, 3.0  # pixels, grey levels
_LOOKS_PER_WORKER = 20  # held-out images that take about as long as the start of a process
_PAIRS_AT_A_TIME = 1 << 15  # pairs of thumbnails compared at a time
_BANDS = 4  # of a hash
_BAND_BITS = 16
_MASK = (1 << _BAND_BITS) - 1
_FLIPS = np.array([0, *(1 << bit for bit in range(_BAND_BITS))], np.int64)
_CANDIDATES = 1 << 22  # hashes compared at a time; limits the memory to some 100 MB


@dataclass(frozen=True, slots=True)
class Copy:
    """An image of a held-out sample that occurs in the training split, or looks like one that does."""

    key: str  # the held-out sample
    place: int  # index of the image in it, from 0
    # bytes: the same encoded bytes; pixels: the same pixels in other bytes; near: nearly the same image; None: an image
    # that looks alike in its thumbnail, and is no copy.
    how: How | None
    # The first such image in the training split; if near, the one with the most similar thumbnail.
    train_key: str
    train_place: int
    bits: int = 0  # number of bits in which the two hashes differ; 0 for bytes and pixels
    difference: float = 0.0  # root mean square difference of the thumbnails, in grey levels; 0 for bytes and pixels
    apart: float = 0.0  # at their own size, see `second_look.apart`; 0 for bytes and pixels
    thumbnails: tuple[bytes, bytes] | None = None  # held-out and train, 1,024 bytes each; None for bytes and pixels


def find_copies(
    heldout_tasks: Sequence[PictureTask],
    train_tasks: Sequence[PictureTask],
    config: ContaminationConfig,
    resources: StageResources,
) -> list[Copy]:
    """Return the copies in order of the held-out tables: at most one per image, of the surest kind. An image that only
    looks like a train image has a Copy without a kind."""
    heldout, train = read_pictures(heldout_tasks), read_pictures(train_tasks)
    copies: dict[int, Copy] = {}
    for how, column in (("bytes", "sha256"), ("pixels", "pixels_sha256")):
        places = pc.index_in(heldout[column], value_set=train[column].combine_chunks(), skip_nulls=True).to_pylist()
        for row, place in enumerate(places):
            if place is not None and row not in copies:
                copies[row] = Copy(*_use(heldout, row), how, *_use(train, place))
    rest = np.setdiff1d(_with_hash(heldout), np.fromiter(copies, np.int64, len(copies)))
    thumbnails = np.concatenate([np.zeros((0, THUMBNAIL_BYTES), np.uint8), *map(read_thumbnails, heldout_tasks)])
    pairs = _alike_hashes(heldout, train, rest, config.max_bits)
    limits = difference_limits(np.minimum(_side(heldout)[pairs.heldout], _side(train)[pairs.train]), config)
    alike = _most_alike(pairs, limits, thumbnails, train_tasks, config.max_looks)
    places, train_places = _places(heldout, heldout_tasks), _places(train, train_tasks)
    tasks = [
        _LookTask(places(row), tuple(train_places(int(pairs.train[one.pair])) for one in found), config.max_apart)
        for row, found in alike.items()
    ]
    rows = list(alike)
    for number, (chosen, distance) in run_tasks(
        look_again, tasks, resources.at_most(1 + len(tasks) // _LOOKS_PER_WORKER)
    ):
        row = rows[number]
        one = alike[row][chosen]
        how = "near" if distance <= config.max_apart else None
        uses = (*_use(heldout, row), how, *_use(train, int(pairs.train[one.pair])))
        shown = (thumbnails[row].tobytes(), one.thumbnail)
        copies[row] = Copy(*uses, int(pairs.bits[one.pair]), one.difference, distance, shown)
    return [copies[row] for row in sorted(copies)]


def difference_limits(sides: np.ndarray | int, config: ContaminationConfig) -> np.ndarray:
    """Return the largest difference of two thumbnails, in grey levels, with which two images are candidates; `sides` is
    (m,) or one, the smallest side of each pair of images, in pixels."""
    return np.where(sides < _SMALL_SIDE, min(config.max_difference, _MAX_SMALL_DIFFERENCE), config.max_difference)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an image is: a sample's byte range in a shard, and the index of the image in the sample."""

    shard: StorePath
    offset: int
    size: int
    checksum: int
    key: str
    place: int

    def read(self) -> memoryview:
        fields = read_record(self.shard, self.offset, self.size, checksum=self.checksum, key=self.key)
        return fields[json.loads(bytes(fields["json"]))["images"][self.place]["name"]]


@dataclass(frozen=True, slots=True)
class _LookTask:
    """A held-out image, and the train images that it is compared with until one is a copy."""

    heldout: _Place
    train: tuple[_Place, ...]
    max_apart: float


def look_again(task: _LookTask) -> tuple[int, float]:
    """Return number and distance of the first train image that is a copy, or else of the nearest one."""
    image, found = bytes(task.heldout.read()), []
    for number, place in enumerate(task.train):
        found.append((apart(image, bytes(place.read())), number))
        if found[-1][0] <= task.max_apart:
            return number, found[-1][0]
    distance, number = min(found)
    return number, distance


def _places(pictures: pa.Table, tasks: Sequence[PictureTask]) -> Callable[[int], _Place]:
    """Return a function from a row of the tasks' tables to the place of its image."""
    ends = np.cumsum([count_pictures(task) for task in tasks])

    def place(row: int) -> _Place:
        task = tasks[int(np.searchsorted(ends, row, side="right"))]
        columns = ("offset", "size", "checksum", "key", "place")
        return _Place(task.directory / task.shard.name, *(pictures[name][row].as_py() for name in columns))

    return place


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Rows of the held-out table, rows of the train table, and bits in which their hashes differ: (m,) int64 each."""

    heldout: np.ndarray
    train: np.ndarray
    bits: np.ndarray

    def of(self, chosen: np.ndarray) -> "_Pairs":
        return _Pairs(self.heldout[chosen], self.train[chosen], self.bits[chosen])


def _use(pictures: pa.Table, row: int) -> tuple[str, int]:
    return pictures["key"][row].as_py(), pictures["place"][row].as_py()


def _with_hash(pictures: pa.Table) -> np.ndarray:
    """Return the rows of images that could be decoded."""
    return np.flatnonzero(pc.is_valid(pictures["phash"]).to_numpy())


def _alike_hashes(heldout: pa.Table, train: pa.Table, rest: np.ndarray, max_bits: int) -> _Pairs:
    """Return pairs with similar hash and aspect, for the rows `rest` of the held-out table, in order of train rows."""
    rows = _with_hash(train)
    heldout_hashes = heldout["phash"].take(pa.array(rest)).to_numpy()
    train_hashes = train["phash"].take(pa.array(rows)).to_numpy()
    distinct, group, sizes = np.unique(train_hashes, return_inverse=True, return_counts=True)
    rows = rows[np.argsort(group, kind="stable")]  # runs of rows with the same hash; `near_pairs` gets each hash once
    query, place = near_pairs(heldout_hashes, distinct, max_bits)
    bits = np.bitwise_count(heldout_hashes[query] ^ distinct[place]).astype(np.int64)
    repeats = sizes[place]
    offsets = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    starts = np.repeat((np.cumsum(sizes) - sizes)[place], repeats)
    pairs = _Pairs(np.repeat(rest[query], repeats), rows[starts + offsets], np.repeat(bits, repeats))
    stretch = np.abs(_log_aspect(heldout)[pairs.heldout] - _log_aspect(train)[pairs.train])
    pairs = pairs.of(stretch <= np.log(_MAX_STRETCH))
    return pairs.of(np.argsort(pairs.train, kind="stable"))


def near_pairs(queries: np.ndarray, hashes: np.ndarray, max_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of a query and a hash that differ in at most `max_bits` bits, which is at most MAX_BITS.

    Args:
        queries: (q,) uint64.
        hashes: (n,) uint64; distinct hashes are faster, since equal ones share a bucket, which is searched completely.

    Returns:
        (m,) int64 indices of queries and (m,) int64 indices of hashes, sorted by both.
    """
    assert 0 <= max_bits <= MAX_BITS, max_bits
    pairs = [np.zeros((2, 0), np.int64)]
    for band in range(_BANDS):
        pairs.extend(_near_in_band(queries, hashes, band, max_bits))
    query, place = np.unique(np.concatenate(pairs, axis=1), axis=1)
    return query, place


def _near_in_band(queries: np.ndarray, hashes: np.ndarray, band: int, max_bits: int) -> Iterator[np.ndarray]:
    """Yield (2, m) int64: near pairs whose band differs in at most one bit, some at a time."""
    ours, keys = (
        ((side >> np.uint64(band * _BAND_BITS)) & np.uint64(_MASK)).astype(np.int64) for side in (queries, hashes)
    )
    order = np.argsort(keys, kind="stable").astype(np.int64)
    counts = np.bincount(keys, minlength=_MASK + 1)
    starts = np.cumsum(counts) - counts
    buckets = (ours[:, None] ^ _FLIPS).ravel()
    owners = np.repeat(np.arange(len(queries)), len(_FLIPS))
    sizes = counts[buckets]
    for begin, end in _pieces(sizes):
        size = sizes[begin:end]
        query = np.repeat(owners[begin:end], size)
        offsets = np.arange(len(query)) - np.repeat(np.cumsum(size) - size, size)
        place = order[np.repeat(starts[buckets[begin:end]], size) + offsets]
        near = np.bitwise_count(queries[query] ^ hashes[place]) <= max_bits
        yield np.stack([query[near], place[near]])


def _pieces(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of buckets with at most _CANDIDATES hashes together, or one bucket that has more."""
    totals = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = totals[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(totals, before + _CANDIDATES, side="right")))
        yield begin, end
        begin = end


def _side(pictures: pa.Table) -> np.ndarray:
    """Return the smaller side of each image, in pixels."""
    return np.minimum(*(pictures[side].fill_null(1).to_numpy() for side in ("width", "height")))


def _log_aspect(pictures: pa.Table) -> np.ndarray:
    width, height = (pictures[side].fill_null(1).to_numpy() for side in ("width", "height"))
    return np.log(width / height)


@dataclass(frozen=True, slots=True, order=True)
class _Alike:
    """A train image that looks like a held-out one: the difference of the thumbnails, number of the pair, thumbnail."""

    difference: float
    pair: int
    thumbnail: bytes


def _most_alike(
    pairs: _Pairs, limits: np.ndarray, thumbnails: np.ndarray, train_tasks: Sequence[PictureTask], max_looks: int
) -> dict[int, list[_Alike]]:
    """Return held-out row -> the train images with the most similar thumbnails, at most `max_looks`, in this order.

    Args:
        limits: (m,) grey levels by which the thumbnails of each pair may differ.
        thumbnails: (held-out rows, 1024) uint8.
    """
    alike: dict[int, list[_Alike]] = {}
    first = 0
    for task in train_tasks:  # one shard's thumbnails at a time
        last = first + count_pictures(task)
        begin, end = np.searchsorted(pairs.train, [first, last])
        train_thumbnails = read_thumbnails(task) if end > begin else None
        for start in range(begin, end, _PAIRS_AT_A_TIME):
            chosen = slice(start, min(start + _PAIRS_AT_A_TIME, end))
            batch = pairs.of(chosen)
            differences = thumbnail_differences(thumbnails[batch.heldout], train_thumbnails[batch.train - first])
            for i in np.flatnonzero(differences <= limits[chosen]).tolist():
                thumbnail = train_thumbnails[batch.train[i] - first].tobytes()
                found = alike.setdefault(int(batch.heldout[i]), [])
                insort(found, _Alike(float(differences[i]), start + i, thumbnail))
                del found[max_looks:]
        first = last
    return alike


def thumbnail_differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the (n,) root mean square differences of two (n, 1024) uint8 of equal brightness and contrast, in grey
    levels."""
    one, other = (pixels - pixels.mean(axis=1, keepdims=True, dtype=np.float32) for pixels in (one, other))
    contrasts = [pixels.std(axis=1, keepdims=True) + 1 for pixels in (one, other)]
    gain = np.clip(contrasts[0] / contrasts[1], 1 / MAX_GAIN, MAX_GAIN)
    return np.sqrt(np.square(one - gain * other).mean(axis=1, dtype=np.float64))
