"""Samples drawn like a mix of vision-language data, as tokenized shards with full bins.

Image tokens are log-normal around 500, one tenth of the samples is text only, one tenth has several images; a few dozen
to a few hundred text tokens, three tenths of which carry loss. Small samples, for tiny models on a CPU, have 24 image
tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.bins import write_bin_partition, write_bins
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.shard_io import ShardWriter
from dataset_builders.contracts.tokenized import INDEX_SCHEMA, PatchFormat, PixelConfig, PixelStore, TokenizedSample
from dataset_builders.pictures.pixel_codecs import encode_sample
from stages.plan_bins.pack import pack
from trainer.contract.parallel import ParallelConfig
from trainer.model.shape import Work

MAX_PATCHES_PER_TOKEN = 4
PAD_MULTIPLE = 4
PIXELS = PatchFormat(
    patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5)
)
_FINGERPRINT = "b" * 16


class TokenIds(Protocol):
    """The facts of a model that its samples depend on; `trainer.data.micro_batch.Geometry` has them.

    Attributes:
        image_token_id: None if the model takes no images.
        spatial_merge_size: a square of patches with this side is one image token.
        patch_bytes: bytes of one patch.
    """

    image_token_id: int | None
    spatial_merge_size: int
    patch_bytes: int


@dataclass(frozen=True, slots=True)
class Ids:
    """A plain `TokenIds`."""

    image_token_id: int | None = None
    spatial_merge_size: int = PIXELS.merge_size
    patch_bytes: int = 3 * PIXELS.patch_size**2


@dataclass(frozen=True)
class Kind:
    """The composition of a sample: text tokens before, between and after images of these grids (t, h, w in patches)."""

    text: int
    grids: tuple[tuple[int, int, int], ...] = ()
    learnt: float = 0.4


@dataclass(frozen=True, slots=True)
class Mix:
    """The sums over some samples. `work.loss_tokens` are the tokens that are predicted, never a sample's first."""

    samples: int
    images: int
    work: Work

    @classmethod
    def of(cls, samples: Iterable[TokenizedSample]) -> "Mix":
        """Return the sums, counted from the samples."""
        count, images, work = 0, 0, np.zeros(5, np.int64)
        for sample in samples:
            patches = sample.image_grid_thw.astype(np.int64).prod(-1)
            length = len(sample.input_ids)
            work += [length, int(sample.loss_mask[1:].sum()), length**2, patches.sum(), (patches**2).sum()]
            count, images = count + 1, images + len(patches)
        return cls(count, images, Work(*work.tolist()))


def draw_kind(
    rng: np.random.Generator, image_tokens: int = 500, text: tuple[int, int] = (40, 300), has_images: bool = True
) -> Kind:
    """Draw one sample of the mix.

    Args:
        image_tokens: median number of an image's tokens.
        text: bounds of the number of text tokens.
        has_images: False for a text-only model, whose samples have text in place of the image tokens.
    """
    which = rng.random()
    images = 0 if which < 0.1 else int(rng.integers(2, 5)) if which < 0.2 else 1
    grids = []
    low, high = image_tokens * 16 / 500, image_tokens * 3000 / 500
    for _ in range(images):
        tokens = float(np.clip(rng.lognormal(np.log(image_tokens), 0.6), low, high)) / max(1, images - 1)
        height = max(1, round(np.sqrt(tokens * rng.uniform(0.5, 2.0))))
        grids.append((1, 2 * height, 2 * max(1, round(tokens / height))))
    number = int(rng.integers(*text))
    if not has_images:
        return Kind(number + sum(h * w // 4 for _, h, w in grids), learnt=0.3)
    return Kind(number, tuple(grids), learnt=0.3)


def pad_multiple_of(*layouts: ParallelConfig) -> int:
    """Return the number of tokens to a multiple of which samples are padded, so that each layout can read them."""
    return max(PAD_MULTIPLE, *(2 * parallel.cp * parallel.tp for parallel in layouts))


def drawing(ids: TokenIds, is_small: bool = False) -> Callable[[np.random.Generator], Kind]:
    """Return the function that draws a sample of the mix for a model; small samples are for a tiny model."""
    small = {"image_tokens": 24, "text": (8, 40)} if is_small else {}
    return partial(draw_kind, **small, has_images=ids.image_token_id is not None)


def make_sample(kind: Kind, ids: TokenIds, vocab: range, seed: int, key: str = "") -> TokenizedSample:
    """Make a sample of random tokens and random pixels. Each image comes after at least one text token."""
    rng = np.random.default_rng(seed)
    pieces, rest = [], kind.text
    for t, h, w in kind.grids:
        before = max(1, rest // (len(kind.grids) + 1))
        rest -= before
        pieces.append(_text(rng, before, ids, vocab))
        pieces.append(np.full(t * h * w // ids.spatial_merge_size**2, ids.image_token_id))
    pieces.append(_text(rng, max(2, rest) if kind.grids else rest, ids, vocab))
    input_ids = np.concatenate(pieces).astype(np.int32)
    is_image = np.zeros(len(input_ids), bool) if ids.image_token_id is None else input_ids == ids.image_token_id
    loss_mask = (rng.random(len(input_ids)) < kind.learnt) & ~is_image
    loss_mask[-1] = kind.learnt > 0
    grids = np.array(kind.grids, np.int32).reshape(-1, 3)
    return TokenizedSample(
        key=key or f"made/{seed:08d}",
        input_ids=input_ids,
        loss_mask=loss_mask.astype(np.uint8),
        image_grid_thw=grids,
        patches=rng.integers(0, 256, (int(grids.prod(-1).sum()), ids.patch_bytes), dtype=np.uint8),
    )


def _text(rng: np.random.Generator, count: int, ids: TokenIds, vocab: range) -> np.ndarray:
    drawn = rng.integers(vocab.start, vocab.stop, count)
    return drawn if ids.image_token_id is None else np.where(drawn == ids.image_token_id, vocab.start, drawn)


def write_drawn_bins(
    directory: Path,
    num_bins: int,
    seq_len: int,
    vocab: range,
    ids: TokenIds,
    draw: Callable[[np.random.Generator], Kind],
    pad_multiple: int = PAD_MULTIPLE,
) -> Mix:
    """Write tokenized shards and `num_bins` full bins of drawn samples, the same for the same arguments.

    Samples that do not fill a bin are left out. In a dataset they would be one bin in many thousands, here one in
    `num_bins`.

    Args:
        vocab: ids that text is drawn from.
        draw: draws a sample, see `drawing`.
        pad_multiple: each sample is padded to a multiple of this number of tokens, as the layout needs.

    Returns:
        the contents of the bins.
    """
    rng = np.random.default_rng(0)
    rows, mixes, total = [], [], 0
    name = "train/shard-00000.tar"
    with ShardWriter(directory, name) as writer:
        while total < num_bins * seq_len:
            key = f"mix/{len(rows):08d}"
            sample = make_sample(draw(rng), ids, vocab, len(rows), key)
            if len(sample.input_ids) > seq_len:
                continue
            record = writer.write(key, encode_sample(sample, "u8", {}))
            mixes.append(Mix.of([sample]))
            total += len(sample.input_ids)
            place = {"offset": record.offset, "size": record.size, "checksum": record.checksum}
            rows.append({"key": key, "subset": "mix", "split": "train", "shard": name} | place | _counts(sample))
        entry = writer.commit("train")
    kept = _write_bins(directory, rows, num_bins, seq_len, pad_multiple)
    pixels = PixelStore(codec="u8", config=PixelConfig(min_pixels=1, max_pixels=1 << 24, patch_format=PIXELS))
    config, stats = {"pad_multiple": pad_multiple}, {"pixels": pixels.model_dump(mode="json")}
    shards = {"parents": {}, "shards": [entry], "stats": stats}
    Manifest(stage="tokenize", version=1, fingerprint=_FINGERPRINT, config=config, **shards).write(directory)
    mixes = [mixes[i] for i in kept]
    work = Work(*np.sum([mix.work for mix in mixes], axis=0).tolist())
    return Mix(len(mixes), sum(mix.images for mix in mixes), work)


def _counts(sample: TokenizedSample) -> dict[str, int]:
    return {
        "num_tokens": len(sample.input_ids),
        "num_images": len(sample.image_grid_thw),
        "num_loss_tokens": int(sample.loss_mask[1:].sum()),
        "num_patches": len(sample.patches),
    }


def _write_bins(
    directory: Path, rows: list[dict[str, object]], num_bins: int, seq_len: int, pad_multiple: int
) -> list[int]:
    """Write the plan of the `num_bins` fullest bins, and return the numbers of the rows in them, bin by bin."""
    tokens, patches = (np.array([row[name] for row in rows]) for name in ("num_tokens", "num_patches"))
    padded = -(-tokens // pad_multiple) * pad_multiple
    bins = pack(padded, patches, seq_len, MAX_PATCHES_PER_TOKEN * seq_len)
    fullest = np.sort(np.argsort(-np.bincount(bins, padded), kind="stable")[:num_bins])
    kept = [i for i in np.argsort(bins, kind="stable").tolist() if bins[i] in fullest]
    write_plan(directory, [rows[i] for i in kept], np.searchsorted(fullest, bins[kept]).tolist())
    return kept


def write_plan(directory: Path, rows: Sequence[dict[str, object]], bins: Sequence[int]) -> None:
    """Write a plan of one epoch and one partition.

    Args:
        rows: rows of the index, in (split, bin, position) order.
        bins: the bin of each row, counted from 0 in each split.
    """
    parts = []
    for split in SPLITS:
        mine = [place for place, row in enumerate(rows) if row["split"] == split]
        if mine:
            table = pa.Table.from_pylist([rows[place] for place in mine], schema=INDEX_SCHEMA)
            parts.append(write_bin_partition(directory, split, 0, 0, table, np.array([bins[i] for i in mine])))
    write_bins(directory, parts)
