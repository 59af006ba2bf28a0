"""Positions of a bin: what the data worker says of them in a few integers, and what a device makes of that.

T = tokens, P = patches before merging, V = image tokens after merging, F = frames, n = samples; a grid is (t, h, w) in
patches. Formulas: transformers 5.23 `models/qwen3_vl/modeling_qwen3_vl.py` (get_rope_index) and `vision_utils.py`.

24 bytes a token and 64 a patch are sooner computed on a device than made on a host and moved. Integers are exact there,
every operation on floats is a single one of float32: all devices give the same bits. Nothing waits for a device. A few
numbers a sample or an image are Python's, for they cost less there than a call of numpy.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import torch

_KEPT = 4096  # grids
RUN_COLUMNS = 9
FRAME_COLUMNS = 3
_NEVER = 1 << 40
# Divisors and moduli of the three axes, see `token_runs`.
_TEXT = (1, 1, 1, _NEVER, _NEVER, _NEVER)
_PADDING = (_NEVER, _NEVER, _NEVER, 1, 1, 1)


class Raster(NamedTuple):
    """What one image's grid says.

    Attributes:
        grid: in patches.
        tokens: how many it makes.
        side: tokens of its longer side.
        steps: divisors and moduli of the three axes, see `token_runs`.
        frame_patches: patches of each frame.
        frames: FRAME_COLUMNS numbers of each frame, end to end, see `patch_positions`.
        patches: of all frames.
    """

    grid: tuple[int, int, int]
    tokens: int
    side: int
    steps: tuple[int, ...]
    frame_patches: tuple[int, ...]
    frames: tuple[int, ...]
    patches: int


@lru_cache(maxsize=_KEPT)
def rasters(grids: bytes, merge: int) -> tuple[Raster, ...]:
    """Of each of a sample's images.

    Args:
        grids: the bytes of its (g, 3) int32 image_grid_thw, by which the answer is found again.
        merge: spatial_merge_size.
    """
    return tuple([_raster(*grid, merge) for grid in np.frombuffer(grids, np.int32).reshape(-1, 3).tolist()])


def _raster(t: int, h: int, w: int, merge: int) -> Raster:
    rows, columns = h // merge, w // merge
    steps = (rows * columns, columns, 1, _NEVER, rows, columns)
    frame = (columns, max(h - 1, 1), max(w - 1, 1))
    return Raster((t, h, w), t * rows * columns, max(rows, columns), steps, (h * w,) * t, frame * t, t * h * w)


def image_starts(
    is_image: np.ndarray, images: Sequence[Sequence[Raster]], bounds: Sequence[int], keys: Sequence[str]
) -> list[int]:
    """The place of the first token of every image of a bin.

    Args:
        is_image: (T,) bool.
        images: of each sample.
        bounds: (n + 1) where each sample begins, and the end.
        keys: of the samples.

    Raises:
        ValueError: a sample's image tokens are not those of its grids, or an image's are not together.
    """
    edges, starts = _stretches(is_image), []
    place, stop = next(edges), next(edges)
    for key, rasters, first, end in zip(keys, images, bounds, bounds[1:]):
        for raster in rasters:
            starts.append(place)
            place += raster.tokens
            if place > stop or place > end:
                raise ValueError(_not_its_grids(key, rasters, is_image[first:end]))
            if place == stop:
                place, stop = next(edges), next(edges)
        if place < end:
            raise ValueError(_not_its_grids(key, rasters, is_image[first:end]))
    return starts


def _stretches(is_image: np.ndarray) -> Iterator[int]:
    """Where image tokens begin and stop, by turns, then the end for ever. Far fewer than tokens, and found sooner."""
    changes = (is_image[1:] != is_image[:-1]).nonzero()[0] + 1
    first = (0,) if len(is_image) and is_image[0] else ()
    return chain(first, changes.tolist(), repeat(len(is_image)))


def _not_its_grids(key: str, rasters: Sequence[Raster], is_image: np.ndarray) -> str:
    grids = [list(raster.grid) for raster in rasters]
    have, make = int(np.count_nonzero(is_image)), sum(raster.tokens for raster in rasters)
    if have == make:
        return f"{key}: other tokens lie between the {have} image tokens of its grids {grids}; tokenize it again"
    return f"{key}: {have} image tokens, but its grids {grids} make {make}; tokenize it again"


def token_runs(
    images: Sequence[Sequence[Raster]],
    starts: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
    first_rows: Sequence[int],
) -> list[int]:
    """A bin as a row of runs of text, images and padding: rows of RUN_COLUMNS integers, end to end.

    Text counts up on all three axes; an image's tokens lie on a grid that starts where the text stopped; text goes
    on after the image's largest side, not after its token count.

    A run has the place where it starts, the position from which it counts, a row (see `image_rows`), and for each of
    the axes t, h, w a divisor, then for each a modulus: token i of a run is at `i // divisor % modulus` from there.

    Args:
        images: of each sample.
        starts: place of the first token of each image.
        lengths: tokens of each sample.
        padding: tokens after each sample, and at the end.
        first_rows: of each image.
    """
    runs: list[int] = []
    image_of, begin = zip(starts, first_rows), 0
    for of_sample, length, gap in zip(images, lengths, padding):
        runs += (begin, 0, 0)
        runs += _TEXT
        done, at = begin, 0
        for (_, tokens, side, steps, _, _, _), (start, row) in zip(of_sample, image_of):
            at += start - done
            runs += (start, at, row)
            runs += steps
            done, at = start + tokens, at + side
            runs += (done, at, 0)
            runs += _TEXT
        begin += length
        if gap:
            runs += (begin, 0, 0)
            runs += _PADDING
            begin += gap
    return [*runs, begin, 0, 0, *_PADDING]


def token_positions(runs: torch.Tensor, run_starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(3, t) int64 mrope positions (t, h, w), from 0 in every sample, 0 in padding.

    Args:
        runs: (n, RUN_COLUMNS) `token_runs`.
        run_starts: (n,) their first column, contiguous.
        places: (t,) int64 of the bin.
    """
    run = _run_at(runs, run_starts, places)
    return (places - run[0]).div(run[3:6], rounding_mode="floor").remainder_(run[6:]).add_(run[1])


def image_rows(runs: torch.Tensor, run_starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(V,) int64 rows of image tokens: each image's are counted from its own.

    Args:
        runs: (n, RUN_COLUMNS) `token_runs`.
        run_starts: (n,) their first column, contiguous.
        places: (V,) int64 of image tokens of the bin.
    """
    run = _run_at(runs[:, :3], run_starts, places)
    return (places - run[0]).add_(run[2])


def _run_at(runs: torch.Tensor, run_starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(columns, t) of the runs in which places lie. Of runs with the same start the last one has tokens."""
    return runs.t().index_select(1, torch.searchsorted(run_starts[1:], places, right=True))


class PatchPositions(NamedTuple):
    """Where patches lie, in merge-block order (the order of the patches).

    Attributes:
        coordinates: (P, 2) int64 row and column of each in its image.
        taps: (P, 4) int64 rows of a side x side table of learned positions, resampled to each image's grid.
        weights: (P, 4) float32 of these, bilinear with corners aligned, summing to 1.
    """

    coordinates: torch.Tensor
    taps: torch.Tensor
    weights: torch.Tensor


def patch_positions(
    frames: torch.Tensor, cu_patches: torch.Tensor, num_patches: int, side: int, merge: int
) -> PatchPositions:
    """Of all frames of a bin.

    Args:
        frames: (F, FRAME_COLUMNS) of each frame the merge x merge blocks of a row, the last row and the last column of
            patches (1 where there is but one).
        cu_patches: (F + 1,) int64 cumulative patches of the frames.
        num_patches: of all of them.
        side: of the table of learned positions.
        merge: spatial_merge_size.
    """
    firsts = cu_patches.div(merge**2, rounding_mode="floor")
    blocks = torch.arange(num_patches // merge**2, device=frames.device)
    frame_of = torch.searchsorted(firsts[1:], blocks, right=True)
    frame, place = frames.t().index_select(1, frame_of), blocks - firsts.index_select(0, frame_of)
    corner = torch.stack((place // frame[0], place % frame[0]))
    # (axis, block, place in the block): rows and columns are alike until they meet
    axis = torch.add(torch.arange(merge, device=frames.device), corner[:, :, None], alpha=merge)
    places, weights = _axis_taps(axis, frame[1:, :, None], side)
    # (block, row in the block, column in the block, tap of the row, tap of the column)
    of_row, of_column = (-1, merge, 1, 2, 1), (-1, 1, merge, 1, 2)
    taps = torch.add(places[1].view(of_column), places[0].view(of_row), alpha=side)
    products = weights[0].view(of_row) * weights[1].view(of_column)
    coordinates = torch.stack(torch.broadcast_tensors(axis[0, :, :, None], axis[1, :, None]), -1)
    return PatchPositions(coordinates.view(-1, 2), taps.reshape(-1, 4), products.reshape(-1, 4))


def _axis_taps(places: torch.Tensor, last: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., 2) int64 places of a side's two nearest learned positions, and their (..., 2) float32 weights.

    Args:
        places: rows or columns.
        last: the last one of the same image.
    """
    source = places.float() * (side - 1) / last
    low = source.floor()
    fraction = source - low
    index = low.long()
    return torch.stack((index, (index + 1).clamp_(max=side - 1)), -1), torch.stack((1 - fraction, fraction), -1)
