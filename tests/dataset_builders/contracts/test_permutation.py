"""A computed permutation: every number once, another order for another key, no visible pattern."""

from collections import Counter

import numpy as np
import pytest

from dataset_builders.contracts.bins import KeyedPermutation

pytestmark = pytest.mark.promise(
    "Bins keep their limits, any step's are found without holding an epoch, and dealing them to ranks by cost, "
    "threads and resumes change none of a step's samples."
)


def test_every_number_comes_once_for_every_small_size():
    for size in [*range(1, 300), 1023, 1024, 1025, 4095, 4097, 65_537]:
        for key in ([0, 0], [0, 1], ["mixture", "ai2d"]):
            found = KeyedPermutation(size, key)(np.arange(size))
            assert np.array_equal(np.sort(found), np.arange(size)), (size, key)


@pytest.mark.parametrize("size", [10**8, 10**12 + 39, 2**62])
def test_samples_of_a_large_one_are_inside_and_differ(size):
    places = np.unique(np.random.default_rng(0).integers(0, size, 200_000))
    found = KeyedPermutation(size, [1, 2])(places)
    assert found.min() >= 0 and found.max() < size and len(np.unique(found)) == len(places)
    counts = np.bincount(found // -(-size // 100), minlength=100)  # evenly spread, by chi squared with 99 degrees
    assert (np.square(counts - counts.mean()) / counts.mean()).sum() < 160


def test_a_place_is_the_same_alone_and_among_others():
    permutation = KeyedPermutation(1000, [7])
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array([place]))[0]) for place in (0, 1, 500, 999)] == whole[[0, 1, 500, 999]].tolist()


def test_it_is_the_same_on_every_machine():
    assert KeyedPermutation(10, [5, 0])(np.arange(10)).tolist() == [4, 7, 6, 1, 0, 8, 3, 9, 2, 5]
    assert KeyedPermutation(10**9, [5, 0])(np.arange(3)).tolist() == [338666666, 59303069, 468865295]


def test_all_orders_of_four_things_are_as_frequent():
    count = Counter(tuple(KeyedPermutation(4, [5, key])(np.arange(4)).tolist()) for key in range(4800))
    assert len(count) == 24 and max(count.values()) < 270 and min(count.values()) > 140


def test_neighbours_do_not_stay_neighbours():
    found = KeyedPermutation(10_000, [3])(np.arange(10_000))
    assert (np.abs(np.diff(found)) == 1).sum() < 12  # two are expected
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.04


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_sizes_it_cannot_do(size):
    with pytest.raises(ValueError, match="it must be 1 to"):
        KeyedPermutation(size, [0])
