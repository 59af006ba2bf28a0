"""Positions of a bin, made on the data worker. Pure numpy: no torch, no model, testable with four integers.

T = tokens, P = patches before merging, V = image tokens after merging, G = images.
Formulas: transformers 5.23 `models/qwen3_vl/modeling_qwen3_vl.py` (get_rope_index) and `vision_utils.py`.
"""

import numpy as np


def mrope_positions(input_ids: np.ndarray, image_grid_thw: np.ndarray, image_token_id: int, merge: int) -> np.ndarray:
    """(3, n) int64 positions (t, h, w) of one sample.

    Text counts up on all three axes; an image's tokens lie on a grid that starts where the text stopped; text goes
    on after the image's largest side, not after its token count.

    Args:
        input_ids: (n,) token ids of the sample.
        image_grid_thw: (g, 3) patches before merging.
        image_token_id: id that fills image slots.
        merge: spatial_merge_size.

    Raises:
        ValueError: the image tokens are not those of the grids.
    """
    slots = np.flatnonzero(input_ids == image_token_id)
    grids = image_grid_thw // np.array([1, merge, merge])
    if len(slots) != grids.prod(-1).sum():
        raise ValueError(
            f"{len(slots)} image tokens, but the grids {image_grid_thw.tolist()} make {grids.prod(-1).sum()}"
        )
    positions = np.empty((3, len(input_ids)), np.int64)
    done, at, first_slot = 0, 0, 0
    for t, h, w in grids.tolist():
        start = int(slots[first_slot])
        at = _count_up(positions, done, start, at)
        done = start + t * h * w
        positions[:, start:done] = np.indices((t, h, w)).reshape(3, -1) + at
        at += max(h, w)
        first_slot += t * h * w
    _count_up(positions, done, len(input_ids), at)
    return positions


def _count_up(positions: np.ndarray, start: int, stop: int, at: int) -> int:
    positions[:, start:stop] = np.arange(at, at + stop - start)
    return at + stop - start


def patch_coordinates(image_grid_thw: np.ndarray, merge: int) -> np.ndarray:
    """(P, 2) int64 row and column of every patch in its image, in merge-block order (the order of the patches)."""
    parts = [np.empty((0, 2), np.int64)]
    for t, h, w in image_grid_thw.tolist():
        row_column = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
        parts.append(np.tile(row_column.transpose(1, 3, 2, 4, 0).reshape(-1, 2), (t, 1)))
    return np.concatenate(parts)


def position_interpolation(image_grid_thw: np.ndarray, side: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear taps (corners aligned) that resample a side x side table of learned positions to each image's grid.

    Returns:
        indices: (P, 4) int64 rows of the table.
        weights: (P, 4) float32, summing to 1; P in merge-block order.
    """
    coordinates = patch_coordinates(image_grid_thw, merge)
    counts = image_grid_thw.prod(-1)
    sizes = np.repeat(image_grid_thw[:, 1:], counts, axis=0)
    source = coordinates.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1).astype(np.float32)
    low = np.floor(source).astype(np.int64)
    fraction = source - low.astype(np.float32)
    high = np.minimum(low + 1, side - 1)
    rows, columns = np.stack([low[:, 0], high[:, 0]], 1), np.stack([low[:, 1], high[:, 1]], 1)
    row_weights, column_weights = (np.stack([1 - fraction[:, axis], fraction[:, axis]], 1) for axis in (0, 1))
    indices = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.reshape(-1, 4), weights.reshape(-1, 4).astype(np.float32)


def cumulative(lengths: np.ndarray | list[int]) -> np.ndarray:
    """(n + 1,) int32 cumulative lengths, starting with 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int32)
