"""Held-out images that are copies of train images: the same bytes, the same pixels, or nearly the same image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.contamination.config import ContaminationConfig
from stages.contamination.near_hashes import near_pairs
from stages.contamination.scan import THUMBNAIL_BYTES, PictureTask, count_pictures, read_pictures, read_thumbnails

How = Literal["bytes", "pixels", "near"]
HOWS: tuple[How, ...] = ("bytes", "pixels", "near")
_MAX_STRETCH = 1.1  # largest ratio of two copies' aspects; rounding to whole pixels causes a few per cent
_PAIRS_AT_A_TIME = 1 << 15  # pairs of thumbnails compared at a time


@dataclass(frozen=True, slots=True)
class Copy:
    """An image of a held-out sample that occurs in the training split.

    Attributes:
        key, place: the held-out sample, and the index of the image in it, from 0.
        how: bytes: the same encoded bytes; pixels: the same pixels in other bytes; or near.
        train_key, train_place: the first such image in the training split; if near, the most similar one.
        bits: number of bits in which the two hashes differ; 0 unless near.
        difference: root mean square difference of the two thumbnails, in grey levels; 0 unless near.
        thumbnails: the thumbnails of a near pair, held-out and train, 1,024 bytes each.
    """

    key: str
    place: int
    how: How
    train_key: str
    train_place: int
    bits: int = 0
    difference: float = 0.0
    thumbnails: tuple[bytes, bytes] | None = None


def find_copies(
    heldout_tasks: Sequence[PictureTask], train_tasks: Sequence[PictureTask], config: ContaminationConfig
) -> list[Copy]:
    """Return the copies in order of the held-out tables: at most one per image, of the surest kind."""
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
    for row, (difference, pair, thumbnail) in _nearest(pairs, thumbnails, train_tasks, config.max_difference).items():
        uses = (*_use(heldout, row), "near", *_use(train, int(pairs.train[pair])))
        copies[row] = Copy(*uses, int(pairs.bits[pair]), difference, (thumbnails[row].tobytes(), thumbnail))
    return [copies[row] for row in sorted(copies)]


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
    rows = rows[np.argsort(group, kind="stable")]
    query, place = near_pairs(heldout_hashes, distinct, max_bits)
    bits = np.bitwise_count(heldout_hashes[query] ^ distinct[place]).astype(np.int64)
    repeats = sizes[place]
    offsets = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    starts = np.repeat((np.cumsum(sizes) - sizes)[place], repeats)
    pairs = _Pairs(np.repeat(rest[query], repeats), rows[starts + offsets], np.repeat(bits, repeats))
    stretch = np.abs(_log_aspect(heldout)[pairs.heldout] - _log_aspect(train)[pairs.train])
    pairs = pairs.of(stretch <= np.log(_MAX_STRETCH))
    return pairs.of(np.argsort(pairs.train, kind="stable"))


def _log_aspect(pictures: pa.Table) -> np.ndarray:
    width, height = (pictures[side].fill_null(1).to_numpy() for side in ("width", "height"))
    return np.log(width / height)


def _nearest(
    pairs: _Pairs, thumbnails: np.ndarray, train_tasks: Sequence[PictureTask], max_difference: float
) -> dict[int, tuple[float, int, bytes]]:
    """Return held-out row -> difference, pair number and thumbnail of the most similar train image, if similar enough.

    Args:
        thumbnails: (held-out rows, 1024) uint8.
    """
    best: dict[int, tuple[float, int, bytes]] = {}
    first = 0
    for task in train_tasks:  # one shard's thumbnails at a time
        last = first + count_pictures(task)
        begin, end = np.searchsorted(pairs.train, [first, last])
        train_thumbnails = read_thumbnails(task) if end > begin else None
        for start in range(begin, end, _PAIRS_AT_A_TIME):
            batch = pairs.of(slice(start, min(start + _PAIRS_AT_A_TIME, end)))
            differences = _differences(thumbnails[batch.heldout], train_thumbnails[batch.train - first])
            for i in np.flatnonzero(differences <= max_difference).tolist():
                row, difference = int(batch.heldout[i]), float(differences[i])
                if row not in best or difference < best[row][0]:
                    best[row] = (difference, start + i, train_thumbnails[batch.train[i] - first].tobytes())
        first = last
    return best


def _differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the (n,) root mean square differences of two (n, 1024) uint8, in grey levels."""
    return np.sqrt(np.square(one.astype(np.float32) - other).mean(axis=1, dtype=np.float64))
