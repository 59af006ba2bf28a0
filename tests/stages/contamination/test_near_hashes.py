"""Near pairs of hashes equal those of comparing every hash with every other."""

import numpy as np
import pytest

from stages.contamination import copies
from stages.contamination.config import MAX_BITS
from stages.contamination.copies import near_pairs

pytestmark = pytest.mark.promise(
    "Held-out images that occur in train, encoded again, resized or cropped by 2% too, count in no score; others that "
    "look alike do; turned or mirrored copies are not looked for."
)


def all_pairs(queries: np.ndarray, hashes: np.ndarray, max_bits: int) -> set[tuple[int, int]]:
    return {tuple(pair) for pair in np.argwhere(np.bitwise_count(queries[:, None] ^ hashes) <= max_bits).tolist()}


def flipped(value: int, bits: list[int]) -> int:
    for bit in bits:
        value ^= 1 << bit
    return value


def hashes_near_each_other(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random hashes, and queries that differ from some of them in 0 to 9 bits at any position."""
    rng = np.random.default_rng(seed)
    hashes = [int(h) for h in rng.integers(0, 2**64, 300, np.uint64)]
    queries = [flipped(hashes[i], rng.choice(64, i % 10, replace=False).tolist()) for i in range(200)]
    return np.array(queries, np.uint64), np.array([*hashes, *hashes[:20]], np.uint64)


@pytest.mark.parametrize("max_bits", range(MAX_BITS + 1))
def test_all_near_pairs_are_found_and_no_others(max_bits):
    queries, hashes = hashes_near_each_other(max_bits)
    query, place = near_pairs(queries, hashes, max_bits)
    found = list(zip(query.tolist(), place.tolist()))
    assert found == sorted(all_pairs(queries, hashes, max_bits)) and len(found) > 15


@pytest.mark.parametrize(
    "spread", [[0, 1, 16, 17, 32, 33, 48], [15, 14, 31, 30, 47, 46, 63], [48, 49, 50, 51, 52, 53, 54]]
)
def test_seven_bits_are_found_however_they_lie(spread):
    query = np.array([flipped(0x0123456789ABCDEF, spread)], np.uint64)
    assert len(near_pairs(query, np.array([0x0123456789ABCDEF], np.uint64), 7)[0]) == 1
    assert len(near_pairs(query, np.array([0x0123456789ABCDEF], np.uint64), 6)[0]) == 0


def test_a_full_bucket_is_searched_in_pieces(monkeypatch):
    monkeypatch.setattr(copies, "_CANDIDATES", 7)
    queries, hashes = hashes_near_each_other(3)
    query, place = near_pairs(queries, hashes, 6)
    assert set(zip(query.tolist(), place.tolist())) == all_pairs(queries, hashes, 6)


def test_nothing_has_no_pairs():
    some, none = np.arange(5, dtype=np.uint64), np.zeros(0, np.uint64)
    for queries, hashes in ((some, none), (none, some), (none, none)):
        assert [len(side) for side in near_pairs(queries, hashes, 6)] == [0, 0]
