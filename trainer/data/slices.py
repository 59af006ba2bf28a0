"""The part of a bin that one rank works on. Pure numpy: no torch, no process group.

T = tokens of the bin, padding included. The sequence is cut twice. Context parallelism cuts every segment into 2 * cp
pieces and gives rank r the pieces r and 2 * cp - 1 - r: one early and one late piece, so that causal attention costs
all ranks the same. Sequence parallelism then cuts a rank's tokens into `sequence_ranks` runs of equal length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.balance import spread_images


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part. The default is the whole bin."""

    pad_multiple: int = 1  # each sample's length is rounded up to a multiple of this
    # number of context-parallel ranks, and the index of this rank among them
    cp: int = 1
    cp_rank: int = 0
    # number and index of the tensor-parallel ranks that divide the sequence: tp with sequence parallelism, else 1
    sequence_ranks: int = 1
    sequence_rank: int = 0
    # number and index of the ranks that hold the bin's tokens and receive its image tokens before these are gathered
    vision_ranks: int = 1
    vision_rank: int = 0
    # number of ranks that share the images of a bin; the image tokens of share i go to vision rank i % vision_ranks
    vision_shares: int = 1
    vision_share: int | None = 0  # index of this rank's share; None if this rank encodes no images and gets no pixels
    has_vision: bool = True  # whether this rank encodes images or receives image tokens

    @property
    def has_pixels(self) -> bool:
        return self.has_vision and self.vision_share is not None


WHOLE = RankSlice()


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated integer ranges with these starts and lengths."""
    ends = lengths.cumsum()
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())


def zigzag_order(bounds: Sequence[int], cp: int) -> np.ndarray:
    """Return (T,) int64 indices of the bin's tokens: context-parallel rank 0's first, then rank 1's, and so on.

    Args:
        bounds: (n + 1) cumulative padded lengths, each a multiple of 2 * cp if cp > 1.
    """
    if cp == 1:
        return np.arange(bounds[-1])
    begins, sizes = np.array(bounds[:-1]), np.diff(bounds) // (2 * cp)
    early = np.arange(cp)
    pieces = np.stack([early, 2 * cp - 1 - early], 1)[:, None]  # (ranks, 1, 2)
    starts = begins[:, None] + sizes[:, None] * pieces  # (ranks, segments, 2)
    return joined_ranges(starts.ravel(), np.broadcast_to(sizes[:, None], starts.shape).ravel())


@dataclass(frozen=True, slots=True)
class ImageShare:
    """The images of a bin, spread over ranks."""

    images: tuple[int, ...]  # indices of the images that this rank encodes, ascending
    tokens: int  # number of image tokens of these images
    # number of image tokens from each other rank that encodes for this vision rank; they follow its own
    arriving_tokens: tuple[int, ...]
    # number of rows that each vision rank contributes to the gathered image tokens; all are padded to the rank with the
    # most
    gathered_rows: int
    first_rows: tuple[int, ...]  # for each image of the bin, the gathered row at which its tokens start


NO_IMAGES = ImageShare((), 0, (), 0, ())


def share_images(patches: Sequence[int], patches_per_token: int, part: RankSlice) -> ImageShare:
    """Return a rank's share of a bin's images, given the patches of each; see `spread_images` for how they are
    assigned."""
    places, mine = part.vision_ranks, part.vision_share
    tokens = [count // patches_per_token for count in patches]
    shares = spread_images(patches, part.vision_shares)
    totals = [sum([tokens[image] for image in share]) for share in shares]
    # The image tokens of share i go to vision rank i % places; all ranks' rows are padded to those of the fullest.
    rows = max(sum(totals[place::places]) for place in range(places))
    first_rows = [0] * len(tokens)
    for place in range(places):
        row = place * rows
        for share in shares[place::places]:
            for image in share:
                first_rows[image] = row
                row += tokens[image]
    others = tuple(totals[i] for i in range(part.vision_rank, len(totals), places) if i != mine)
    own = () if mine is None else tuple(shares[mine])
    return ImageShare(own, 0 if mine is None else totals[mine], others, rows, tuple(first_rows))
