"""The part of a bin that one rank works on. Pure numpy: no torch, no process group.

T = tokens of the bin, padding included. The sequence is cut twice: context parallel cuts every segment into 2 * cp
pieces and gives rank r the pieces r and 2 * cp - 1 - r (an early and a late one, so that causal attention costs all
ranks the same); sequence parallel then cuts a rank's tokens into `sequence_ranks` runs of equal length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.balance import spread_images


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part. The default is the whole bin.

    Attributes:
        pad_multiple: each sample's length is rounded up to a multiple of this.
        cp, cp_rank: number of context-parallel ranks, and which of them this is.
        sequence_ranks, sequence_rank: the same for the tensor-parallel ranks that divide the sequence: tp with sequence
            parallel, else 1.
        vision_ranks, vision_rank: the same for the places that the image tokens of a bin come to before they are
            gathered: the ranks that hold its tokens.
        vision_shares: ranks that share the images of a bin; those of share i come to place i % vision_ranks.
        vision_share: this rank's; None: it encodes no images, and gets no pixels.
        has_vision: this rank encodes images or gets their tokens.
    """

    pad_multiple: int = 1
    cp: int = 1
    cp_rank: int = 0
    sequence_ranks: int = 1
    sequence_rank: int = 0
    vision_ranks: int = 1
    vision_rank: int = 0
    vision_shares: int = 1
    vision_share: int | None = 0
    has_vision: bool = True

    @property
    def has_pixels(self) -> bool:
        return self.has_vision and self.vision_share is not None


WHOLE = RankSlice()


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers from each start upwards, as many as its length says, one range after another."""
    ends = lengths.cumsum()
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())


def zigzag_order(bounds: Sequence[int], cp: int) -> np.ndarray:
    """(T,) int64 places in the bin, those of context-parallel rank 0 first, then rank 1's, and so on.

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
    """The images of a bin, spread over ranks.

    Attributes:
        images: numbers of the images that this rank encodes, ascending.
        tokens: their image tokens.
        arriving_tokens: image tokens of each other rank that encodes for this one's place; they follow its own.
        gathered_rows: rows that each place contributes to the gathered image tokens; that with most has no filling.
        first_rows: for each image of the bin, the gathered row at which its tokens begin.
    """

    images: tuple[int, ...]
    tokens: int
    arriving_tokens: tuple[int, ...]
    gathered_rows: int
    first_rows: tuple[int, ...]


NO_IMAGES = ImageShare((), 0, (), 0, ())


def share_images(patches: Sequence[int], patches_per_token: int, part: RankSlice) -> ImageShare:
    """A rank's share of the images of a bin, which are dealt by their patches.

    Args:
        patches: patches of each image of the bin.
        patches_per_token: spatial_merge_size^2.
    """
    places, mine = part.vision_ranks, part.vision_share
    tokens = [count // patches_per_token for count in patches]
    shares = spread_images(patches, part.vision_shares)
    totals = [sum([tokens[image] for image in share]) for share in shares]
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
