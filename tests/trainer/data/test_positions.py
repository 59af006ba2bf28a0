"""Positions of tokens and patches against transformers', and image tokens that are not those of their grids."""

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.hardware import requires_gpus
from tests.helpers.tiers import full
from trainer.data.micro_batch import Geometry, make_micro_batch, patch_coordinates
from trainer.parts.vision.module import position_taps

IMAGE, VIDEO = 9, 8
TWO = [[1, IMAGE, IMAGE], [IMAGE, 1]]  # ids of two samples


def sample_of(ids: list[int], grids, key: str = "made/1", videos: tuple[int, ...] = ()) -> TokenizedSample:
    """`videos` are the indices of the grids that are of temporal groups."""
    grids = np.array(grids, np.int32).reshape(-1, 3)
    is_video = np.isin(np.arange(len(grids)), videos)
    return TokenizedSample(
        key=key,
        input_ids=np.array(ids, np.int32),
        loss_mask=np.zeros(len(ids), np.uint8),
        image_grid_thw=grids,
        is_video=is_video,
        later_patches=np.zeros((int(grids[is_video].prod(1).sum()), 12), np.uint8),
        patches=np.zeros((int(grids.prod(1).sum()), 12), np.uint8),
    )


def positions_of(ids: list[int], grids, merge: int = 2, videos: tuple[int, ...] = ()) -> torch.Tensor:
    sample = sample_of(ids, grids, videos=videos)
    return make_micro_batch([sample], Geometry(IMAGE, merge, 12, VIDEO), len(ids)).position_ids


def transformers_positions(ids: list[int], images, videos, merge: int) -> torch.Tensor:
    """(3, n) of `get_rope_index`, which needs no weights, for grids of images and of whole videos."""
    model = object.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig(vision_config={"spatial_merge_size": merge})
    tokens = torch.tensor(ids)[None]
    kinds = (tokens == IMAGE) + 2 * (tokens == VIDEO).int()
    grids = [torch.tensor(grids) if len(grids) else None for grids in (images, videos)]
    positions, _ = model.get_rope_index(tokens, kinds, *grids)
    return positions[:, 0]


@pytest.mark.parametrize("seed", range(40))
def test_token_positions_are_transformers(seed):
    rng = np.random.default_rng(seed)
    merge, ids, of_groups = int(rng.choice([1, 2, 2, 3])), [], []
    grids: dict[int, list[tuple[int, int, int]]] = {IMAGE: [], VIDEO: []}
    for _ in range(rng.integers(0, 5)):
        token = int(rng.choice([IMAGE, IMAGE, VIDEO]))
        t, (h, w) = int(rng.integers(1, 4)) if token == VIDEO else 1, (merge * rng.integers(1, 7, 2)).tolist()
        grids[token].append((t, h, w))
        for _ in range(t):
            # transformers wants text between images, and writes the time of each temporal group before it
            ids += [1] * rng.integers(min(len(of_groups), 1), 5) + [token] * (h * w // merge**2)
            of_groups.append(((1, h, w), token))
    ids += [1] * rng.integers(0 if ids else 1, 4)
    videos = tuple(number for number, (_, token) in enumerate(of_groups) if token == VIDEO)
    ours = positions_of(ids, [grid for grid, _ in of_groups], merge, videos)
    assert torch.equal(ours, transformers_positions(ids, grids[IMAGE], grids[VIDEO], merge))


def test_images_that_touch_have_a_grid_each():
    """transformers wants text between images."""
    positions = positions_of([1, *[IMAGE] * 2, *[IMAGE] * 3, 2], [(1, 2, 4), (1, 6, 2)])
    assert positions.tolist() == [[0, 1, 1, 3, 3, 3, 6], [0, 1, 1, 3, 4, 5, 6], [0, 1, 2, 3, 3, 3, 6]]


@pytest.mark.parametrize(
    ("ids", "grids", "wrong"),
    [
        ([[1, IMAGE]], [[(1, 4, 4)]], r"made/1: 1 image tokens, but its grids \[\[1, 4, 4\]\] make 4"),
        ([[1, IMAGE, IMAGE, 1, IMAGE, IMAGE]], [[(1, 4, 4)]], "made/1: other tokens lie between the 4 image tokens of"),
        (
            [[1, IMAGE, 2, IMAGE, IMAGE]],
            [[(1, 2, 4), (1, 2, 2)]],
            "made/1: other tokens lie between the 3 image tokens",
        ),
        ([[1, IMAGE, IMAGE, 1, IMAGE]], [[(1, 4, 4)]], "made/1: 3 image tokens, but its grids"),  # up to its end
        # Nor are one sample's image tokens another's.
        (TWO, [[(1, 2, 4)], []], r"made/2: 1 image tokens, but its grids \[\] make 0"),
        (TWO, [[], [(1, 2, 2)]], r"made/1: 2 image tokens, but its grids \[\] make 0"),
        (TWO, [[(1, 2, 2)], [(1, 2, 4)]], r"made/1: 2 image tokens, but its grids \[\[1, 2, 2\]\] make 1"),
        (TWO, [[(1, 2, 6)], []], r"made/1: 2 image tokens, but its grids \[\[1, 2, 6\]\] make 3"),
        (TWO, [[(1, 2, 4)], [(1, 2, 2), (1, 2, 2)]], "made/2: 1 image tokens, but its grids"),
    ],
)
def test_image_tokens_that_are_not_those_of_a_sample_s_grids_are_refused(ids, grids, wrong):
    samples = [sample_of(*pair, f"made/{number}") for number, pair in enumerate(zip(ids, grids, strict=True), start=1)]
    with pytest.raises(ValueError, match=wrong):
        make_micro_batch(samples, Geometry(IMAGE, 2, 12), 6)


@pytest.mark.parametrize(
    ("ids", "geometry", "wrong"),
    [
        ([1, VIDEO, 2, IMAGE], Geometry(IMAGE, 2, 12), "made/1: it has a video, but the model takes none; leave the"),
        ([1, IMAGE, 2, VIDEO], Geometry(IMAGE, 2, 12, VIDEO), "made/1: tokens of images stand for a video of its"),
        ([1, VIDEO, 2, VIDEO], Geometry(IMAGE, 2, 12, VIDEO), "made/1: tokens of images stand for a video of its"),
        ([1, VIDEO, 2, 3], Geometry(IMAGE, 2, 12, VIDEO), "made/1: 1 image tokens, but its grids"),
    ],
)
def test_a_video_is_refused_by_a_model_that_takes_none_and_where_tokens_are_of_another_kind(ids, geometry, wrong):
    with pytest.raises(ValueError, match=wrong):
        make_micro_batch([sample_of(ids, [(1, 2, 2)] * 2, videos=(0,))], geometry, 4)


def patches_of(grids, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates and frames of patches, as a micro batch has them."""
    tokens = sum(int(np.prod(grid)) for grid in grids) // merge**2
    batch = make_micro_batch([sample_of([1, *[IMAGE] * tokens], grids)], Geometry(IMAGE, merge, 12), tokens + 1)
    return batch.patch_coordinates, batch.patch_frames


def axis_of(places: np.ndarray, sizes: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Two taps and their weights of each place of an axis, in numpy's float32."""
    source = places.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1).astype(np.float32)
    low = np.floor(source).astype(np.int64)
    fraction = source - low.astype(np.float32)
    return np.stack([low, np.minimum(low + 1, side - 1)], 1), np.stack([1 - fraction, fraction], 1)


def check_patches(device: str, side: int, merge: int) -> None:
    """With every size of an axis up to 200 patches, on any device to the bit."""
    sizes = range(merge, 201, merge)
    grids = [(1 + h % 3, h, w) for h, w in zip(sizes, reversed(sizes))] + [(1, h, h) for h in sizes]
    coordinates, frames = patches_of(grids, merge)
    assert torch.equal(coordinates.long(), get_vision_position_ids(torch.tensor(grids), merge))
    taps, weights = (part.cpu() for part in position_taps(coordinates.to(device), frames.to(device), side))
    (rows, of_rows), (columns, of_columns) = (
        axis_of(coordinates[:, axis].numpy(), frames[:, axis].numpy(), side) for axis in (0, 1)
    )
    assert np.array_equal(taps, (rows[:, :, None] * side + columns[:, None]).reshape(-1, 4))
    assert np.array_equal(weights, (of_rows[:, :, None] * of_columns[:, None]).reshape(-1, 4))
    their_taps, their_weights = get_vision_interpolation_indices_and_weights(
        torch.tensor(grids), side, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    assert taps.dtype == torch.int64 and torch.equal(taps, their_taps)
    # They take the second weight of an axis as 1 - (1 - fraction), which rounds once more.
    assert weights.dtype == torch.float32 and (weights - their_weights).abs().max() <= 2**-23


@pytest.mark.parametrize(("side", "merge"), [(16, 2), full(48, 2), full(27, 3), full(3, 1)])
def test_patch_positions_taps_and_weights_are_transformers(side, merge):
    check_patches("cpu", side, merge)


@requires_gpus(1)
def test_a_gpu_makes_the_same_bits_without_waiting():
    check_patches("cuda", 48, 2)
    coordinates, frames = (part.cuda() for part in patches_of([(1, 4, 6)], 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        position_taps(coordinates, frames, 48)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_image_has_no_patch():
    coordinates = patch_coordinates(np.empty((0, 2), np.int32), 2)
    assert coordinates.shape == (0, 2) and coordinates.dtype == np.int32
    taps, weights = position_taps(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int32), 16)
    assert taps.shape == weights.shape == (0, 4)


def test_an_image_of_one_row_has_its_corner():
    taps, weights = position_taps(torch.tensor([[0, 0], [0, 1]]), torch.tensor([[1, 2], [1, 2]]), 16)
    assert (taps * weights).sum(1).tolist() == [0, 15]
