"""Positions of a bin, made on the data worker. Pure numpy: no torch, no model, testable with four integers.

T = tokens, P = patches before merging, V = image tokens after merging, n = samples; a grid is (t, h, w) in patches.
Formulas: transformers 5.23 `models/qwen3_vl/modeling_qwen3_vl.py` (get_rope_index) and `vision_utils.py`.

What depends on one image's grid alone is computed when the grid is first seen and kept for the next image that has it,
read-only; a bin is then put together by copying. A few numbers a sample or an image are Python's, for they cost less
there than a call of numpy.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

Grid = Sequence[int]

_KEPT = 1024  # grids. Of each 36 bytes a patch are kept: 74 MB where images have 2,000 patches


def mrope_positions(input_ids: np.ndarray, image_grid_thw: np.ndarray, image_token_id: int, merge: int) -> np.ndarray:
    """(3, n) int32 positions (t, h, w) of one sample: `bin_positions` of a bin that holds nothing else.

    Args:
        input_ids: (n,) token ids of the sample.
        image_grid_thw: (g, 3) patches before merging.
        image_token_id: id that fills image slots.
        merge: spatial_merge_size.

    Raises:
        ValueError: the image tokens are not those of the grids.
    """
    images, length = image_rasters([image_grid_thw.tolist()], merge), len(input_ids)
    starts = image_starts(np.flatnonzero(input_ids == image_token_id), images, [0, length])
    return bin_positions(images, starts, [length], [0, 0])


class Raster(NamedTuple):
    """An image's tokens.

    Attributes:
        positions: (3, tokens) int32 frame, row and column of each.
        side: tokens of its longer side.
        grid: in patches.
    """

    positions: np.ndarray
    tokens: int
    side: int
    grid: Grid


def image_rasters(grids: Sequence[Sequence[Grid]], merge: int) -> list[list[Raster]]:
    """Of each sample's images.

    Args:
        grids: of each sample's images.
        merge: spatial_merge_size.
    """
    return [[_raster(t, h, w, merge) for t, h, w in each] for each in grids]


def image_starts(slots: np.ndarray, images: Sequence[Sequence[Raster]], bounds: Sequence[int]) -> list[int]:
    """The place of the first token of every image of a bin.

    Args:
        slots: (V,) places of the image tokens, ascending.
        images: of each sample.
        bounds: (n + 1) where each sample begins, and the end.

    Raises:
        ValueError: a sample's image tokens are not those of its grids.
    """
    firsts, starts = slots.searchsorted(bounds).tolist(), []
    for rasters, first, stop in zip(images, firsts, firsts[1:]):
        place = first
        for raster in rasters:
            starts.append(place)
            place += raster.tokens
        if place != stop:
            grids = [list(raster.grid) for raster in rasters]
            raise ValueError(f"{stop - first} image tokens, but the grids {grids} make {place - first}")
    return slots.take(starts).tolist() if starts else []


def bin_positions(
    images: Sequence[Sequence[Raster]], starts: Sequence[int], lengths: Sequence[int], padding: Sequence[int]
) -> np.ndarray:
    """(3, T) int32 positions (t, h, w) of a bin, from 0 in every sample, 0 in its padding.

    Text counts up on all three axes; an image's tokens lie on a grid that starts where the text stopped; text goes
    on after the image's largest side, not after its token count. So a bin is a row of pieces that begin at 0, each
    raised by the position where it begins.

    Args:
        images: of each sample.
        starts: place of the first token of each image.
        lengths: tokens of each sample.
        padding: tokens after each sample, and at the end.
    """
    text, none = _counting(sum(lengths) + sum(padding))
    pieces, raised, sizes = [], [], []
    start_of, begin = iter(starts), 0
    for rasters, length, gap in zip(images, lengths, padding):
        done, at = begin, 0
        for (raster, tokens, side, _), start in zip(rasters, start_of):
            before = start - done
            pieces += (text[:, :before], raster)
            raised += (at, at + before)
            sizes += (before, tokens)
            done, at = start + tokens, at + before + side
        begin += length
        pieces.append(text[:, : begin - done])
        raised.append(at)
        sizes.append(begin - done)
        if gap:
            pieces.append(none[:, :gap])
            raised.append(0)
            sizes.append(gap)
            begin += gap
    positions = np.empty(text.shape, np.int32)
    np.concatenate([*pieces, none[:, : padding[-1]]], axis=1, out=positions)
    positions += np.array([*raised, 0], np.int32).repeat([*sizes, padding[-1]])
    return positions


@lru_cache(maxsize=8)
def _counting(length: int) -> tuple[np.ndarray, np.ndarray]:
    """(3, length) positions of a text and of padding, as views."""
    return np.broadcast_to(np.arange(length, dtype=np.int32), (3, length)), np.broadcast_to(np.int32(0), (3, length))


@lru_cache(maxsize=_KEPT)
def _raster(t: int, h: int, w: int, merge: int) -> Raster:
    frames, rows, columns = t, h // merge, w // merge
    positions = _read_only(np.indices((frames, rows, columns), np.int32).reshape(3, -1))
    return Raster(positions, positions.shape[1], max(rows, columns), (t, h, w))


def patch_coordinates(grids: np.ndarray | Sequence[Grid], merge: int) -> np.ndarray:
    """(P, 2) int64 row and column of every patch in its image, in merge-block order (the order of the patches).

    Args:
        grids: of all images.
        merge: spatial_merge_size.
    """
    frames = [_frame_coordinates(h, w, merge) for h, w in _frames(grids)]
    return np.concatenate([np.empty((0, 2), np.int64), *frames], dtype=np.int64)


def position_interpolation(grids: np.ndarray | Sequence[Grid], side: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear taps (corners aligned) that resample a side x side table of learned positions to each image's grid.

    Args:
        grids: of all images.

    Returns:
        indices: (P, 4) int64 rows of the table.
        weights: (P, 4) float32, summing to 1; P in merge-block order.
    """
    taps = [_frame_taps(h, w, side, merge) for h, w in _frames(grids)]
    indices = np.concatenate([np.empty((0, 4), np.int64), *(each for each, _ in taps)], dtype=np.int64)
    return indices, np.concatenate([np.empty((0, 4), np.float32), *(weights for _, weights in taps)])


def _frames(grids: np.ndarray | Sequence[Grid]) -> list[tuple[int, int]]:
    """(h, w) of every frame of every image."""
    listed = grids.tolist() if isinstance(grids, np.ndarray) else grids
    return [(h, w) for t, h, w in listed for _ in range(t)]


@lru_cache(maxsize=_KEPT)
def _frame_coordinates(h: int, w: int, merge: int) -> np.ndarray:
    """(h * w, 2) row and column, in as few bytes as hold them."""
    row_column = np.indices((h, w), np.min_scalar_type(max(h, w))).reshape(2, h // merge, merge, w // merge, merge)
    return _read_only(row_column.transpose(1, 3, 2, 4, 0).reshape(-1, 2))


@lru_cache(maxsize=_KEPT)
def _frame_taps(h: int, w: int, side: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """(h * w, 4) rows of the table, in as few bytes as hold them, and (h * w, 4) float32 weights."""
    rows, row_weights = _axis_taps(h, side)
    columns, column_weights = _axis_taps(w, side)
    # (row of blocks, column of blocks, row in the block, column in the block, tap of the row, tap of the column)
    of_row, of_column = (h // merge, 1, merge, 1, 2, 1), (1, w // merge, 1, merge, 1, 2)
    indices = rows.reshape(of_row) * side + columns.reshape(of_column)
    weights = row_weights.reshape(of_row) * column_weights.reshape(of_column)
    smallest = indices.astype(np.min_scalar_type(side * side - 1))
    return _read_only(smallest.reshape(-1, 4)), _read_only(weights.reshape(-1, 4))


@lru_cache(maxsize=_KEPT)
def _axis_taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(size, 2) int64 places of a side's two nearest learned positions, and their (size, 2) float32 weights."""
    source = np.arange(size).astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source).astype(np.int64)
    fraction = source - low.astype(np.float32)
    places = np.stack([low, np.minimum(low + 1, side - 1)], 1)
    return _read_only(places), _read_only(np.stack([1 - fraction, fraction], 1))


def _read_only(kept: np.ndarray) -> np.ndarray:
    kept.setflags(write=False)
    return kept


def cumulative(lengths: Sequence[int]) -> np.ndarray:
    """(n + 1,) int32 cumulative lengths, starting with 0."""
    return np.array([*accumulate(lengths, initial=0)], np.int32)
