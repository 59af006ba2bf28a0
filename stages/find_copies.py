"""Held-out pictures that are copies of train pictures: the same bytes, the same pixels, or nearly the same picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.near_hashes import near_pairs
from stages.picture_scan import THUMBNAIL_BYTES, PictureTask, count_pictures, read_pictures, read_thumbnails

How = Literal["bytes", "pixels", "near"]
HOWS: tuple[How, ...] = ("bytes", "pixels", "near")
_MAX_STRETCH = 1.1  # between the aspects of two copies: rounding to whole pixels makes a few per cent
_PAIRS = 1 << 15  # thumbnails compared in one go


@dataclass(frozen=True, slots=True)
class Likeness:
    """What counts as nearly the same picture.

    Attributes:
        max_bits: bits in which the two hashes may differ.
        max_difference: root mean square difference of the two thumbnails, in grey levels of 255.
    """

    max_bits: int
    max_difference: float


@dataclass(frozen=True, slots=True)
class Copy:
    """A picture of a held-out sample that occurs in train.

    Attributes:
        key, place: the held-out sample, and which of its pictures, from 0.
        how: the same encoded bytes; the same pixels in other bytes; or near.
        train_key, train_place: the first picture in train of which it is one; of near ones the most alike.
        bits: in which the two hashes differ; 0 unless near.
        difference: of the two thumbnails, in grey levels; 0 unless near.
        thumbnails: of a near pair, held-out and train, 1,024 bytes each.
    """

    key: str
    place: int
    how: How
    train_key: str
    train_place: int
    bits: int = 0
    difference: float = 0.0
    thumbnails: tuple[bytes, bytes] | None = None


def find_copies(heldout: Sequence[PictureTask], train: Sequence[PictureTask], likeness: Likeness) -> list[Copy]:
    """The copies in order of the held-out tables: at most one for each picture, of the surest kind."""
    asked, known = read_pictures(heldout), read_pictures(train)
    found: dict[int, Copy] = {}
    for how, column in (("bytes", "sha256"), ("pixels", "pixels_sha256")):
        places = pc.index_in(asked[column], value_set=known[column].combine_chunks(), skip_nulls=True).to_pylist()
        for row, place in enumerate(places):
            if place is not None and row not in found:
                found[row] = Copy(*_use(asked, row), how, *_use(known, place))
    rest = np.setdiff1d(_with_hash(asked), np.fromiter(found, np.int64, len(found)))
    mine = np.concatenate([np.zeros((0, THUMBNAIL_BYTES), np.uint8), *map(read_thumbnails, heldout)])
    for near in _nearest(_alike_hashes(asked, known, rest, likeness.max_bits), mine, train, likeness.max_difference):
        shown = (mine[near.heldout].tobytes(), near.thumbnail)
        uses = (*_use(asked, near.heldout), "near", *_use(known, near.train))
        found[near.heldout] = Copy(*uses, near.bits, near.difference, shown)
    return [found[row] for row in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Rows of the held-out table, rows of the train table, and bits in which their hashes differ: (m,) int64 each."""

    heldout: np.ndarray
    train: np.ndarray
    bits: np.ndarray

    def of(self, chosen: np.ndarray) -> "_Pairs":
        return _Pairs(self.heldout[chosen], self.train[chosen], self.bits[chosen])


@dataclass(frozen=True, slots=True)
class _Near:
    """One pair, as numbers of rows, with the train picture's thumbnail."""

    heldout: int
    train: int
    bits: int
    difference: float
    thumbnail: bytes


def _use(pictures: pa.Table, row: int) -> tuple[str, int]:
    return pictures["key"][row].as_py(), pictures["place"][row].as_py()


def _with_hash(pictures: pa.Table) -> np.ndarray:
    """Rows of pictures that could be decoded."""
    return np.flatnonzero(pc.is_valid(pictures["phash"]).to_numpy())


def _alike_hashes(asked: pa.Table, known: pa.Table, rest: np.ndarray, max_bits: int) -> _Pairs:
    """Pairs of like hashes and like aspect, for the rows `rest` of the held-out table."""
    rows = _with_hash(known)
    mine, theirs = (table["phash"].take(pa.array(some)).to_numpy() for table, some in ((asked, rest), (known, rows)))
    distinct, group, sizes = np.unique(theirs, return_inverse=True, return_counts=True)
    rows = rows[np.argsort(group, kind="stable")]
    query, place = near_pairs(mine, distinct, max_bits)
    bits = np.bitwise_count(mine[query] ^ distinct[place]).astype(np.int64)
    repeats = sizes[place]
    offsets = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    starts = np.repeat((np.cumsum(sizes) - sizes)[place], repeats)
    pairs = _Pairs(np.repeat(rest[query], repeats), rows[starts + offsets], np.repeat(bits, repeats))
    stretch = np.abs(_log_aspect(asked)[pairs.heldout] - _log_aspect(known)[pairs.train])
    return pairs.of(stretch <= np.log(_MAX_STRETCH))


def _log_aspect(pictures: pa.Table) -> np.ndarray:
    width, height = (pictures[side].fill_null(1).to_numpy() for side in ("width", "height"))
    return np.log(width / height)


def _nearest(pairs: _Pairs, mine: np.ndarray, train: Sequence[PictureTask], max_difference: float) -> Iterator[_Near]:
    """For each held-out picture of the pairs the most alike one of train, where it is alike enough.

    Args:
        mine: (held-out rows, 1024) uint8.
    """
    best: dict[int, _Near] = {}
    pairs, first = pairs.of(np.argsort(pairs.train, kind="stable")), 0
    for task in train:  # one shard's thumbnails at a time
        last = first + count_pictures(task)
        begin, end = np.searchsorted(pairs.train, [first, last])
        theirs = read_thumbnails(task) if end > begin else mine
        for start in range(begin, end, _PAIRS):
            some = pairs.of(slice(start, min(start + _PAIRS, end)))
            differences = _differences(mine[some.heldout], theirs[some.train - first])
            for i in np.flatnonzero(differences <= max_difference):
                row, difference = int(some.heldout[i]), float(differences[i])
                if row not in best or difference < best[row].difference:
                    there = int(some.train[i])
                    best[row] = _Near(row, there, int(some.bits[i]), difference, theirs[there - first].tobytes())
        first = last
    yield from best.values()


def _differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Two (n, 1024) uint8 -> (n,) root mean square differences, in grey levels."""
    return np.sqrt(np.square(one.astype(np.float32) - other).mean(axis=1, dtype=np.float64))
