"""Small seeded tokenized samples of every kind, and plans of bins, for tests of the trainer."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.bins import Bin, BinSums, write_bin_partition, write_bins
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.tokenized import INDEX_SCHEMA, SIZES, TokenizedSample
from trainer.data.micro_batch import Geometry


@dataclass(frozen=True)
class Kind:
    """The composition of a sample: text tokens before, between and after images of these grids (t, h, w in patches),
    then videos, whose temporal groups have text between them too."""

    text: int
    grids: tuple[tuple[int, int, int], ...] = ()
    learnt: float = 0.4
    videos: tuple[tuple[int, int, int], ...] = ()


TEXT_ONLY = Kind(9)
ONE_IMAGE = Kind(11, ((1, 4, 6),))
TWO_IMAGES = Kind(12, ((1, 2, 2), (1, 6, 4)))
TALL_IMAGE = Kind(7, ((1, 10, 2),))  # shares a power of two with the others, and is shorter
VIDEOS = Kind(8, ((1, 2, 4),), videos=((2, 2, 4), (1, 4, 2)))
MIXED = [ONE_IMAGE, TEXT_ONLY, TWO_IMAGES, TALL_IMAGE, VIDEOS]


def make_sample(kind: Kind, geometry: Geometry, vocab: range, seed: int, key: str = "") -> TokenizedSample:
    """Make a sample of random tokens and random pixels. Each image and each temporal group comes after at least one
    text token."""
    rng = np.random.default_rng(seed)
    groups = [(1, h, w) for t, h, w in kind.videos for _ in range(t)]
    grids = np.array([*kind.grids, *groups], np.int32).reshape(-1, 3)
    is_video = np.arange(len(grids)) >= len(kind.grids)
    pieces, rest = [], kind.text
    for (t, h, w), is_group in zip(grids.tolist(), is_video):
        before = max(1, rest // (len(grids) + 1))
        rest -= before
        pieces.append(_text(rng, before, geometry, vocab))
        token = geometry.video_token_id if is_group else geometry.image_token_id
        pieces.append(np.full(t * h * w // geometry.spatial_merge_size**2, token))
    pieces.append(_text(rng, max(2, rest) if len(grids) else rest, geometry, vocab))
    input_ids = np.concatenate(pieces).astype(np.int32)
    loss_mask = (rng.random(len(input_ids)) < kind.learnt) & ~np.isin(input_ids, _marks(geometry))
    loss_mask[-1] = kind.learnt > 0
    patches, later_patches = (
        rng.integers(0, 256, (int(sizes.sum()), geometry.patch_bytes), dtype=np.uint8)
        for sizes in (grids.prod(-1), grids[is_video].prod(-1))
    )
    return TokenizedSample(
        key=key or f"made/{seed:08d}",
        input_ids=input_ids,
        loss_mask=loss_mask.astype(np.uint8),
        image_grid_thw=grids,
        is_video=is_video,
        patches=patches,
        later_patches=later_patches,
    )


def _text(rng: np.random.Generator, count: int, geometry: Geometry, vocab: range) -> np.ndarray:
    drawn = rng.integers(vocab.start, vocab.stop, count)
    return np.where(np.isin(drawn, _marks(geometry)), vocab.start, drawn)


def _marks(geometry: Geometry) -> list[int]:
    return [token for token in (geometry.image_token_id, geometry.video_token_id) if token is not None]


def make_samples(kinds: list[Kind], geometry: Geometry, vocab: range, seed: int = 0) -> list[TokenizedSample]:
    return [make_sample(kind, geometry, vocab, seed * 1000 + i) for i, kind in enumerate(kinds)]


def sum_bin(refs: Bin) -> BinSums:
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


def write_plan(
    directory: Path, rows: Sequence[dict[str, Any]], bins: Sequence[int], seq_len: int, pad_multiple: int
) -> None:
    """Write an artifact of plan_bins of one epoch and one partition, with chosen bins.

    Args:
        rows: rows of the index, in (split, bin, position) order.
        bins: the bin of each row, counted from 0 in each split.
    """
    parts, num_bins = [], {}
    for split in SPLITS:
        mine = [place for place, row in enumerate(rows) if row["split"] == split]
        num_bins[split] = len({bins[i] for i in mine})
        if mine:
            table = pa.Table.from_pylist([rows[place] for place in mine], schema=INDEX_SCHEMA)
            parts.append(write_bin_partition(directory, split, 0, 0, table, np.array([bins[i] for i in mine])))
    write_bins(directory, parts)
    subsets: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row["split"] == "train":
            subsets[row["subset"]].update(num_samples=1, **{name: row[name] for name in SIZES})
    epoch = {"num_bins": num_bins["train"], "subsets": {name: dict(sums) for name, sums in subsets.items()}}
    Manifest(
        stage="plan_bins",
        version=1,
        fingerprint="e" * 16,
        config={"seq_len": seq_len, "pad_multiple": pad_multiple},
        parents={},
        stats={"num_bins": num_bins, "epochs": [epoch]},
    ).write(directory)
