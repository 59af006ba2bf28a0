import numpy as np
import pytest
import torch

from tests.helpers.hardware import requires_gpus
from trainer.positions import (
    FRAME_COLUMNS,
    RUN_COLUMNS,
    PatchPositions,
    image_rows,
    image_starts,
    patch_positions,
    rasters,
    token_positions,
    token_runs,
)

IMAGE = 9


def rasters_of(grids, merge: int = 2):
    return rasters(np.array(grids, np.int32).reshape(-1, 3).tobytes(), merge)


def runs_of(ids, grids, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a bin of one sample, whose images' rows begin at 100, 200, ..."""
    images, is_image = [rasters_of(grids)], np.array(ids) == IMAGE
    starts = image_starts(is_image, images, [0, len(ids)], ["made/1"])
    rows = range(100, 100 * len(starts) + 100, 100)
    runs = torch.tensor(token_runs(images, starts, [len(ids)], [padding, 0], rows)).view(-1, RUN_COLUMNS)
    return runs, runs[:, 0].contiguous()


def positions_of(ids, grids, padding: int = 0) -> torch.Tensor:
    return token_positions(*runs_of(ids, grids, padding), torch.arange(len(ids) + padding))


def patches_of(grids, side: int, merge: int = 2, device: str = "cpu") -> PatchPositions:
    images = rasters_of(grids, merge)
    counts = [count for image in images for count in image.frame_patches]
    frames = torch.tensor([number for image in images for number in image.frames], device=device)
    cumulative = torch.tensor([0, *np.cumsum(counts)], device=device)
    return patch_positions(frames.long().view(-1, FRAME_COLUMNS), cumulative, sum(counts), side, merge)


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
    positions = positions_of([1, 2, 3], [])
    assert positions.tolist() == [[0, 1, 2]] * 3


def test_an_image_of_four_tokens():
    positions = positions_of([1, IMAGE, IMAGE, IMAGE, IMAGE, 2], [(1, 4, 4)])
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
    got = positions_of(ids, grids, padding=3)
    assert np.array_equal(got[:, :-3], slow_positions(ids, grids, 2)) and not got[:, -3:].any()


def test_image_tokens_that_are_not_the_grids_are_refused():
    with pytest.raises(ValueError, match=r"made/1: 1 image tokens, but its grids \[\[1, 4, 4\]\] make 4"):
        positions_of([1, IMAGE], [(1, 4, 4)])


def test_image_tokens_that_are_not_together_are_refused():
    with pytest.raises(ValueError, match=r"made/1: other tokens lie between the 4 image tokens of its grids"):
        positions_of([1, IMAGE, IMAGE, 1, IMAGE, IMAGE], [(1, 4, 4)])
    with pytest.raises(ValueError, match="made/1: 3 image tokens, but its grids"):  # up to the end of the sample
        positions_of([1, IMAGE, IMAGE, 1, IMAGE], [(1, 4, 4)])


def starts_of(ids, grids_of_samples, bounds) -> list[int]:
    images = [rasters_of(grids) for grids in grids_of_samples]
    return image_starts(np.array(ids) == IMAGE, images, bounds, [f"made/{i + 1}" for i in range(len(images))])


def test_images_that_touch_across_samples_and_at_the_ends():
    ids = [*[IMAGE] * 2, 1, *[IMAGE] * 2, *[IMAGE] * 3, 1, IMAGE]
    two, one = (1, 2, 4), (1, 2, 2)
    assert starts_of(ids, [[two, two], [two, one, one]], [0, 5, 10]) == [0, 3, 5, 7, 9]
    assert starts_of([1, 2], [[], []], [0, 1, 2]) == [] == starts_of([], [], [0])


@pytest.mark.parametrize(
    ("grids", "wrong"),
    [
        ([[(1, 2, 4)], []], r"made/2: 1 image tokens, but its grids \[\] make 0"),
        ([[], [(1, 2, 2)]], r"made/1: 2 image tokens, but its grids \[\] make 0"),
        ([[(1, 2, 2)], [(1, 2, 4)]], r"made/1: 2 image tokens, but its grids \[\[1, 2, 2\]\] make 1"),
        ([[(1, 2, 6)], []], r"made/1: 2 image tokens, but its grids \[\[1, 2, 6\]\] make 3"),  # takes the next one's
        ([[(1, 2, 4), (1, 2, 2)], []], r"made/1: 2 image tokens, but its grids"),
        ([[(1, 2, 4)], [(1, 2, 2), (1, 2, 2)]], r"made/2: 1 image tokens, but its grids"),
    ],
)
def test_one_sample_s_image_tokens_are_not_another_s(grids, wrong):
    with pytest.raises(ValueError, match=wrong):
        starts_of([1, IMAGE, IMAGE, IMAGE, 1], grids, [0, 3, 5])


def test_rows_of_an_image_are_counted_from_its_first():
    ids = [1, *[IMAGE] * 4, *[IMAGE] * 2, 1, IMAGE]
    places = torch.tensor([1, 2, 4, 5, 6, 8])
    rows = image_rows(*runs_of(ids, [(1, 4, 4), (1, 4, 2), (1, 2, 2)]), places)
    assert rows.tolist() == [100, 101, 103, 200, 201, 300]


def test_patches_come_in_blocks():
    got = patches_of([(1, 2, 4)], 16).coordinates
    assert got.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


def test_interpolation_weights_sum_to_one_and_hit_the_corners():
    _, taps, weights = patches_of([(1, 4, 6), (1, 2, 2)], 16)
    assert taps.shape == weights.shape == (28, 4)
    assert torch.allclose(weights.sum(1), torch.ones(28))
    assert taps.min() >= 0 and taps.max() < 256
    values = (taps * weights).sum(1)
    assert values[0] == 0  # first patch of the first image: upper left corner
    assert values[-1] == 255  # last patch of the last one: lower right corner


def axis_of(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Two taps and their weights of each place of an axis, in numpy's float32."""
    source = np.arange(size).astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source).astype(np.int64)
    fraction = source - low.astype(np.float32)
    return np.stack([low, np.minimum(low + 1, side - 1)], 1), np.stack([1 - fraction, fraction], 1)


def check_patches(device: str, side: int, merge: int) -> None:
    """Bit for bit, with every size of an axis up to 200 patches."""
    sizes = range(merge, 201, merge)
    grids = [(1 + h % 3, h, w) for h, w in zip(sizes, reversed(sizes))] + [(1, h, h) for h in sizes]
    coordinates, taps, weights = (field.cpu().numpy() for field in patches_of(grids, side, merge, device))
    first = 0
    for t, h, w in grids:
        (rows, row_weights), (columns, column_weights) = axis_of(h, side), axis_of(w, side)
        for _ in range(t):
            part = slice(first, first + h * w)
            r, c = coordinates[part].T
            assert np.array_equal(np.sort(r * w + c), np.arange(h * w))
            assert np.array_equal(taps[part], (rows[r][:, :, None] * side + columns[c][:, None]).reshape(-1, 4))
            assert np.array_equal(
                weights[part], (row_weights[r][:, :, None] * column_weights[c][:, None]).reshape(-1, 4)
            )
            first += h * w
    assert first == len(taps)


@pytest.mark.parametrize(("side", "merge"), [(48, 2), (16, 2), (27, 3), (3, 1)])
def test_patches_are_bit_equal_to_numpys(side, merge):
    check_patches("cpu", side, merge)


@requires_gpus(1)
def test_a_gpu_makes_the_same_bits_without_waiting():
    check_patches("cuda", 48, 2)
    runs, starts = (part.cuda() for part in runs_of([1, *[IMAGE] * 6, 1], [(1, 4, 6)], padding=2))
    places = torch.arange(10, device="cuda")
    frames = torch.tensor(rasters_of([(1, 4, 6)])[0].frames, device="cuda").view(-1, FRAME_COLUMNS)
    cumulative = torch.tensor([0, 24], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        positions, rows = token_positions(runs, starts, places), image_rows(runs, starts, places[1:7])
        patch_positions(frames, cumulative, 24, 48, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(positions.cpu(), positions_of([1, *[IMAGE] * 6, 1], [(1, 4, 6)], padding=2))
    assert rows.tolist() == [*range(100, 106)]


def test_no_image_has_no_patch():
    coordinates, taps, weights = patches_of([], 16)
    assert coordinates.shape == (0, 2) and taps.shape == weights.shape == (0, 4)
