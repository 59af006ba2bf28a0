"""Small seeded tokenized samples of every kind, and plans of bins, for tests of the trainer."""

from collections.abc import Sequence

import numpy as np

from dataset_builders.contracts.bins import Bin, BinSums
from dataset_builders.contracts.tokenized import TokenizedSample
from stages.rate.drawn import Kind, make_sample, write_plan
from trainer.data.micro_batch import Geometry

__all__ = ["Kind", "make_sample", "write_plan"]  # tests import them from here


TEXT_ONLY = Kind(9)
ONE_IMAGE = Kind(11, ((1, 4, 6),))
TWO_IMAGES = Kind(12, ((1, 2, 2), (1, 6, 4)))
TALL_IMAGE = Kind(7, ((1, 10, 2),))  # shares a power of two with the others, and is shorter
MIXED = [ONE_IMAGE, TEXT_ONLY, TWO_IMAGES, TALL_IMAGE]


def make_samples(kinds: list[Kind], geometry: Geometry, vocab: range, seed: int = 0) -> list[TokenizedSample]:
    """Make one sample of each kind."""
    return [make_sample(kind, geometry, vocab, seed * 1000 + i) for i, kind in enumerate(kinds)]


def sum_bin(refs: Bin) -> BinSums:
    """Return the sums of one bin over its samples."""
    return BinSums(
        num_samples=len(refs),
        num_tokens=sum(ref.num_tokens for ref in refs),
        num_loss_tokens=sum(ref.num_loss_tokens for ref in refs),
        num_patches=sum(ref.num_patches for ref in refs),
        num_images=sum(ref.num_images for ref in refs),
        tokens_squared=sum(ref.num_tokens**2 for ref in refs),
        patches_squared=sum(ref.num_patches**2 / ref.num_images for ref in refs if ref.num_images),
    )


class ListedPlan(list[Bin]):
    """Bins in memory with the interface of a plan of one epoch."""

    @property
    def epoch_sizes(self) -> tuple[int, ...]:
        return (len(self),)

    def sums(self, numbers: Sequence[int]) -> BinSums:
        return BinSums(*map(np.array, zip(*(sum_bin(self[number]) for number in numbers))))
