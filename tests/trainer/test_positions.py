import numpy as np
import pytest

from trainer.positions import cumulative, mrope_positions, patch_coordinates, position_interpolation

IMAGE = 9


def slow_positions(input_ids, grids, merge):
    """One token at a time."""
    rows, at, place = [], 0, 0
    grids = list(grids)
    while place < len(input_ids):
        if input_ids[place] != IMAGE:
            rows.append((at, at, at))
            at, place = at + 1, place + 1
            continue
        t, h, w = grids.pop(0)
        for frame in range(t):
            rows += [(at + frame, at + r, at + c) for r in range(h // merge) for c in range(w // merge)]
        place += t * h * w // merge**2
        at += max(h, w) // merge
    return np.array(rows).T


def test_text_counts_up_on_all_axes():
    positions = mrope_positions(np.array([1, 2, 3]), np.empty((0, 3), int), IMAGE, 2)
    assert positions.tolist() == [[0, 1, 2]] * 3


def test_an_image_of_four_tokens():
    positions = mrope_positions(np.array([1, IMAGE, IMAGE, IMAGE, IMAGE, 2]), np.array([[1, 4, 4]]), IMAGE, 2)
    assert positions.tolist() == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_positions_equal_the_slow_ones(seed):
    rng = np.random.default_rng(seed)
    ids, grids = [], []
    for _ in range(rng.integers(0, 4)):
        ids += [1] * rng.integers(0, 4)  # also images that touch
        grids.append((1, 2 * rng.integers(1, 5), 2 * rng.integers(1, 5)))
        ids += [IMAGE] * (grids[-1][1] * grids[-1][2] // 4)
    ids += [1] * rng.integers(1, 4)
    got = mrope_positions(np.array(ids), np.array(grids, int).reshape(-1, 3), IMAGE, 2)
    assert np.array_equal(got, slow_positions(ids, grids, 2))


def test_image_tokens_that_are_not_the_grids_are_refused():
    with pytest.raises(ValueError, match=r"1 image tokens, but the grids \[\[1, 4, 4\]\] make 4"):
        mrope_positions(np.array([1, IMAGE]), np.array([[1, 4, 4]]), IMAGE, 2)


def test_patches_come_in_blocks():
    got = patch_coordinates(np.array([[1, 2, 4]]), 2)
    assert got.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


def test_interpolation_weights_sum_to_one_and_hit_the_corners():
    grids = np.array([[1, 4, 6], [1, 2, 2]])
    indices, weights = position_interpolation(grids, 16, 2)
    assert indices.shape == weights.shape == (28, 4)
    assert np.allclose(weights.sum(1), 1)
    assert indices.min() >= 0 and indices.max() < 256
    table = np.arange(256)
    values = (table[indices] * weights).sum(1)
    assert values[0] == 0  # first patch of the first image: upper left corner
    assert values[-1] == 255  # last patch of the last one: lower right corner


def test_no_image_has_no_patch():
    none = np.empty((0, 3), int)
    assert patch_coordinates(none, 2).shape == (0, 2)
    assert position_interpolation(none, 16, 2)[0].shape == (0, 4)
    assert cumulative([]).tolist() == [0]
