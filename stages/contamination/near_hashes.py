"""Pairs of 64-bit hashes that differ in a few bits, without comparing every hash with every other.

Multi-index hashing (Norouzi, Punjani, Fleet, "Fast Search in Hamming Space with Multi-Index Hashing", CVPR 2012): two
hashes that differ in at most 7 bits differ in at most one bit in one of four bands of 16 bits. So every hash is indexed
four times, by each of its bands, and a query searches 4 * 17 of 4 * 65,536 buckets.
"""

from collections.abc import Iterator

import numpy as np

MAX_BITS = 7
_BANDS = 4
_BAND_BITS = 16
_MASK = (1 << _BAND_BITS) - 1
_FLIPS = np.array([0, *(1 << bit for bit in range(_BAND_BITS))], np.int64)
_CANDIDATES = 1 << 22  # candidates compared at a time; limits the memory to some 100 MB


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
    keys = _band(hashes, band)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(keys, minlength=_MASK + 1))
    starts = ends - np.bincount(keys, minlength=_MASK + 1)
    drawers = (_band(queries, band)[:, None] ^ _FLIPS).ravel()
    owners = np.repeat(np.arange(len(queries)), len(_FLIPS))
    sizes = (ends - starts)[drawers]
    for begin, end in _pieces(sizes):
        size = sizes[begin:end]
        query = np.repeat(owners[begin:end], size)
        offsets = np.arange(len(query)) - np.repeat(np.cumsum(size) - size, size)
        place = order[np.repeat(starts[drawers[begin:end]], size) + offsets]
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


def _band(hashes: np.ndarray, band: int) -> np.ndarray:
    return ((hashes >> np.uint64(band * _BAND_BITS)) & np.uint64(_MASK)).astype(np.int64)
