"""Positions of a sample's tokens on the axes time, row and column, equal to `get_rope_index` of transformers 5.23.

See `models/qwen3_vl/modeling_qwen3_vl.py` there. A family with other positions has a function of its own with the same
arguments and names it in its `Geometry`.
"""

from collections.abc import Sequence

import numpy as np


def mrope_positions(length: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> np.ndarray:
    """(3, n) int64 positions, from 0.

    Text counts up on all three axes. An image's tokens lie on a grid that begins where the text before it stopped, and
    the text continues after the grid's longer side. Without images the three rows are equal.

    Args:
        length: n, tokens of the sample.
        starts: place of the first token of each image.
        grids: (t, h, w) of each image, in tokens.
    """
    positions = np.empty((3, length), np.int64)
    positions[:] = np.arange(length)
    for start, (frames, rows, columns) in zip(starts, grids):
        stop = start + frames * rows * columns
        positions[:, start:stop] = positions[0, start] + np.indices((frames, rows, columns)).reshape(3, -1)
        positions[:, stop:] += max(rows, columns) - (stop - start)
    return positions
