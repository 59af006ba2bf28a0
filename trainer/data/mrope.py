"""Positions of a sample's tokens on the axes time, row and column, equal to `get_rope_index` of transformers 5.23.

See `models/qwen3_vl/modeling_qwen3_vl.py` in transformers. A family with other positions defines its own function with
the same arguments and sets it in its `Geometry`.
"""

from collections.abc import Sequence

import numpy as np


def mrope_positions(length: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return (3, n) int64 positions, from 0.

    Text counts up on all three axes. An image's tokens form a grid that starts at the next position after the text
    before it, and the text continues after the grid's longer side. Without images the three rows are equal.

    Args:
        starts: index of the first token of each image.
        grids: (t, h, w) of each image, in tokens.
    """
    positions = np.empty((3, length), np.int64)
    positions[:] = np.arange(length)
    for start, (frames, rows, columns) in zip(starts, grids):
        stop = start + frames * rows * columns
        positions[:, start:stop] = positions[0, start] + np.indices((frames, rows, columns)).reshape(3, -1)
        positions[:, stop:] += max(rows, columns) - (stop - start)
    return positions
