"""Which part of a bin one rank works on. Pure numpy: no torch, no process group.

T = tokens of the bin, padding included. A rank's part of the sequence is cut twice: context parallel cuts every segment
into 2 * cp pieces and gives rank r the pieces r and 2 * cp - 1 - r (the early and the late, so that causal attention
costs all ranks the same); sequence parallel then cuts what a rank holds into `sequence_ranks` runs of equal length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    lengths = np.diff(cu_seqlens)
    start = np.repeat(cu_seqlens[:-1], lengths)
    piece = (places - start) * 2 * cp // np.repeat(lengths, lengths)
    owner = np.minimum(piece, 2 * cp - 1 - piece)
    return np.argsort(owner, kind="stable")


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
    tokens = np.rint(np.asarray(patches, np.float64) * tokens_per_patch).astype(np.int64)
    shares = spread_images(patches, ranks)
    totals = [int(tokens[share].sum()) for share in shares]
    first_row = np.zeros(len(tokens), np.int64)
    for owner, share in enumerate(shares):
        before = np.cumsum(tokens[share]) - tokens[share]
        first_row[share] = owner * max(totals) + before
    within = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    return ImageShare(tuple(shares[rank]), totals[rank], max(totals), np.repeat(first_row, tokens) + within)
