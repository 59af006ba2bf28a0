"""Which part of a bin one rank works on. Pure numpy: no torch, no process group.

T = tokens of the bin, padding included. A rank's part of the sequence is cut twice: context parallel cuts every segment
into 2 * cp pieces and gives rank r the pieces r and 2 * cp - 1 - r (the early and the late, so that causal attention
costs all ranks the same); sequence parallel then cuts what a rank holds into `sequence_ranks` runs of equal length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from trainer.balance import spread_images


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part. The default is the whole bin.

    Attributes:
        pad_multiple: each sample's length is rounded up to this.
        cp: context-parallel ranks, and which of them this is.
        sequence_ranks: tensor-parallel ranks that divide the sequence: tp with sequence parallel, else 1.
        vision_ranks: ranks that share the images of a bin, and which of them this is.
        has_vision: this rank encodes images; others get no pixels.
    """

    pad_multiple: int = 1
    cp: int = 1
    cp_rank: int = 0
    sequence_ranks: int = 1
    sequence_rank: int = 0
    vision_ranks: int = 1
    vision_rank: int = 0
    has_vision: bool = True


WHOLE = RankSlice()


def zigzag_order(cu_seqlens: np.ndarray, cp: int) -> np.ndarray:
    """(T,) int64 places in the bin, those of context-parallel rank 0 first, then rank 1's, and so on.

    Args:
        cu_seqlens: (n + 1,) cumulative padded lengths, each a multiple of 2 * cp.
    """
    places = np.arange(cu_seqlens[-1], dtype=np.int64)
    if cp == 1:
        return places
    begins, sizes = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens) // (2 * cp)
    early = np.arange(cp)[:, None]
    pieces = np.stack([begins + early * sizes, begins + (2 * cp - 1 - early) * sizes], 2).ravel()  # (rank, segment, 2)
    counts = np.tile(np.repeat(sizes, 2), cp)
    places += np.repeat(pieces - (np.cumsum(counts) - counts), counts)
    return places


@dataclass(frozen=True, slots=True)
class ImageShare:
    """The images of a bin, spread over ranks.

    Attributes:
        images: numbers of the images this rank encodes, ascending.
        tokens: image tokens it makes of them.
        gathered_rows: rows that each rank contributes to the gathered image tokens; the longest has no filling.
        rows: (V,) int64, for each image token of the bin its row in the gathered ones.
    """

    images: tuple[int, ...]
    tokens: int
    gathered_rows: int
    rows: np.ndarray


def share_images(patches: Sequence[int], tokens_per_patch: float, ranks: int, rank: int) -> ImageShare:
    """Deal the images of a bin to `ranks` by their patches.

    Args:
        patches: patches of each image of the bin.
        tokens_per_patch: 1 / spatial_merge_size^2.
    """
    tokens = [round(count * tokens_per_patch) for count in patches]
    rows = np.arange(sum(tokens))
    if ranks == 1:
        return ImageShare(tuple(range(len(tokens))), len(rows), len(rows), rows)
    shares = spread_images(patches, ranks)
    totals = [sum(tokens[image] for image in share) for share in shares]
    first_row = [0] * len(tokens)
    for owner, share in enumerate(shares):
        row = owner * max(totals)
        for image in share:
            first_row[image] = row
            row += tokens[image]
    moved = [row - before for row, before in zip(first_row, accumulate(tokens, initial=0))]
    rows += np.repeat(np.array(moved, np.int64), np.array(tokens, np.int64))
    return ImageShare(tuple(shares[rank]), totals[rank], max(totals), rows)
