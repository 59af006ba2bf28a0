"""The coordinates of patches in their frames, in storage order: block by block, one image token per block."""

import numpy as np


def patch_coordinates(frames: np.ndarray, merge: int) -> np.ndarray:
    """Return (P, 2) int32 row and column of each patch in its frame.

    Args:
        frames: (F, 2) numbers of rows and columns of each frame, in patches, multiples of `merge`.
        merge: spatial_merge_size; patches are stored in blocks of merge x merge, one row of blocks after the other.
    """
    blocks = frames // merge
    counts = blocks.prod(1)
    block = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # index of each block in its frame
    corners = np.stack(np.divmod(block, np.repeat(blocks[:, 1], counts)), 1).astype(np.int32) * merge
    inside = np.stack(np.divmod(np.arange(merge**2), merge), 1).astype(np.int32)
    return (corners[:, None] + inside).reshape(-1, 2)
