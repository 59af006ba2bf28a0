"""The places of patches in their frames, in the order of storage: blocks that become one image token each."""

import numpy as np


def patch_coordinates(frames: np.ndarray, merge: int) -> np.ndarray:
    """(P, 2) int32 row and column of each patch in its frame.

    Args:
        frames: (F, 2) rows and columns of patches of each frame, multiples of `merge`.
        merge: spatial_merge_size: patches come in blocks of merge x merge, one row of blocks after the other.
    """
    blocks = frames // merge
    counts = blocks.prod(1)
    block = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of its frame
    corners = np.stack(np.divmod(block, np.repeat(blocks[:, 1], counts)), 1).astype(np.int32) * merge
    inside = np.stack(np.divmod(np.arange(merge**2), merge), 1).astype(np.int32)
    return (corners[:, None] + inside).reshape(-1, 2)
