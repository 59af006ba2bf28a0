"""MicroBatch: one rank's part of one bin as tensors. Padding, label shift, positions and slices are made here, once,
on the data worker."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from trainer.positions import (
    Grid,
    bin_positions,
    cumulative,
    image_rasters,
    image_starts,
    patch_coordinates,
    position_interpolation,
)
from trainer.ragged import Ragged
from trainer.slices import WHOLE, ImageShare, RankSlice, share_images, zigzag_order


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a micro batch must know of the model: a few integers of config.json."""

    image_token_id: int
    spatial_merge_size: int
    position_side: int
    patch_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MicroBatch:
    """One rank's part of one bin.

    T = tokens of the bin, t = this rank's after context parallel, s = those after sequence parallel; N = this rank's
    loss tokens, P = patches and G = images this rank encodes, V = image tokens that lie in its s, n = segments.

    A rank that has no image to encode carries one blank image of merge x merge patches whose token goes nowhere, so
    that the vision encoder takes part in every step on every rank and its gradients are zero rather than missing.

    Attributes:
        keys: the samples, in order.
        input_ids: (1, t) int64.
        position_ids: (3, t) int64 mrope positions, from 0 in every sample.
        cu_seqlens: (n + 1,) int32 cumulative lengths of the segments of the whole bin: each sample with its own
            padding (which no real token sees, for it comes last and attention is causal), then the padding at the end.
        max_seqlen: the longest segment.
        cp_order: (T,) int64 places of the bin in the order in which context-parallel ranks hold them.
        loss_index: (N,) int64 places in t whose logits are needed.
        labels: a member a sample, (N,) int64 in all: the token to be predicted there, the next one of the same sample.
        patches: a member an image (a frame, where it has several), (P, 3 * patch_size^2) uint8 in all.
        image_index: (V,) int64 places in s of image tokens.
        image_rows: (V,) int64 their rows among the image tokens gathered from all ranks that encode.
        encoded_rows: image tokens that this rank encodes; a blank image's is not counted.
        gathered_rows: rows that each rank gives to the gathered image tokens.
        vision_cu_seqlens: (G + 1,) int32 patches of each image, cumulative.
        vision_max_seqlen: patches of the largest image.
        patch_coordinates: (P, 2) int64 row and column.
        position_taps: (P, 4) int64 rows of the table of learned positions.
        position_weights: (P, 4) float32.
        sample_lengths: tokens of each sample of the bin, without padding.
        image_patches: patches of each image of the bin.
        num_loss_tokens: loss tokens of the bin, over all ranks.
    """

    keys: tuple[str, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    cp_order: torch.Tensor
    loss_index: torch.Tensor
    labels: Ragged
    patches: Ragged
    image_index: torch.Tensor
    image_rows: torch.Tensor
    encoded_rows: int
    gathered_rows: int
    vision_cu_seqlens: torch.Tensor
    vision_max_seqlen: int
    patch_coordinates: torch.Tensor
    position_taps: torch.Tensor
    position_weights: torch.Tensor
    sample_lengths: tuple[int, ...]
    image_patches: tuple[int, ...]
    num_loss_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(self.sample_lengths)

    @property
    def num_slots(self) -> int:
        """Tokens of the bin, padding included."""
        return len(self.cp_order)

    def __eq__(self, other: object) -> bool:
        """Equal in every field, tensors with dtype and device."""
        if not isinstance(other, MicroBatch):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    __hash__ = None  # values may be written to

    def _map(self, change: Callable[[torch.Tensor | Ragged], torch.Tensor | Ragged]) -> "MicroBatch":
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: change(value) for name, value in fields.items() if isinstance(value, torch.Tensor | Ragged)}
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """The same batch on `device`, copied asynchronously where pinned."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """The same batch in page-locked memory."""
        return self._map(lambda value: value.pin_memory())


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    return a == b


@dataclass(slots=True)
class _Bin:
    """Samples laid end to end, whole. A segment is a sample with its padding, or the padding at the end.

    Attributes:
        lengths: tokens of each sample.
        cu_seqlens: (m + 1,) where each segment begins, and the end.
        max_seqlen: the longest segment.
        grids: of each image.
        is_loss: (T,) the next token of the same sample is to be learnt.
        slots: (V,) places of the image tokens.
    """

    samples: Sequence[TokenizedSample]
    lengths: list[int]
    cu_seqlens: np.ndarray
    max_seqlen: int
    grids: list[Grid]
    input_ids: np.ndarray
    position_ids: np.ndarray
    is_loss: np.ndarray
    slots: np.ndarray


def make_micro_batch(
    samples: Sequence[TokenizedSample], geometry: Geometry, seq_len: int, part: RankSlice = WHOLE
) -> MicroBatch:
    """Lay samples end to end in `seq_len` tokens and take a rank's part; no samples make a bin of padding.

    Raises:
        ValueError: the samples do not fit, or a sample's image tokens are not those of its grids.
    """
    whole = _lay_out(samples, geometry, seq_len, part.pad_multiple)
    order = zigzag_order(whole.cu_seqlens, part.cp)
    places = order.reshape(part.cp, -1)[part.cp_rank]
    loss_index = np.flatnonzero(_held(whole.is_loss, places))
    loss_places = places.take(loss_index)
    labels = whole.input_ids.take(loss_places + 1)
    return MicroBatch(
        keys=tuple([s.key for s in samples]),
        input_ids=_int64(_held(whole.input_ids, places))[None],
        position_ids=_int64(_held(whole.position_ids, places)),
        cu_seqlens=torch.from_numpy(whole.cu_seqlens),
        max_seqlen=whole.max_seqlen,
        cp_order=torch.from_numpy(order),
        loss_index=torch.from_numpy(loss_index),
        labels=Ragged(_int64(labels), _count_by_sample(loss_places, whole)),
        **_vision(whole, places, geometry, part),
        sample_lengths=tuple(whole.lengths),
        image_patches=tuple([t * h * w for t, h, w in whole.grids]),
        num_loss_tokens=int(np.count_nonzero(whole.is_loss)),
    )


def _int64(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _held(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """What lies at a rank's places of the bin, along the last axis; `values` itself where that is all of it."""
    return values if len(places) == values.shape[-1] else values.take(places, axis=-1)


def _lay_out(samples: Sequence[TokenizedSample], geometry: Geometry, seq_len: int, pad_multiple: int) -> _Bin:
    lengths = [len(s.input_ids) for s in samples]
    padding = [-length % pad_multiple for length in lengths]
    bounds = [*accumulate(map(operator.add, lengths, padding), initial=0)]
    if bounds[-1] > seq_len:
        raise ValueError(f"samples of {bounds[-1]} tokens do not fit in seq_len={seq_len}: {[s.key for s in samples]}")
    padding.append(seq_len - bounds[-1])
    cu_seqlens = np.array([*bounds, seq_len] if padding[-1] else bounds, np.int32)
    input_ids = _end_to_end([s.input_ids for s in samples], padding, np.int32)
    # The one shift by one: place i predicts token i + 1 of the same sample where that token is to be learnt.
    is_loss = np.zeros(seq_len, bool)
    np.not_equal(_end_to_end([s.loss_mask for s in samples], padding, np.uint8)[1:], 0, out=is_loss[:-1])
    for end in bounds[1:]:
        is_loss[end - 1] = False
    grids = [s.image_grid_thw.tolist() for s in samples]
    slots = np.flatnonzero(input_ids == geometry.image_token_id)
    images = image_rasters(grids, geometry.spatial_merge_size)
    starts = image_starts(slots, images, bounds)
    return _Bin(
        samples,
        lengths,
        cu_seqlens,
        max(map(operator.sub, [*bounds[1:], seq_len], bounds)),
        grids=[*chain.from_iterable(grids)],
        input_ids=input_ids,
        position_ids=bin_positions(images, starts, lengths, padding),
        is_loss=is_loss,
        slots=slots,
    )


def _end_to_end(members: Sequence[np.ndarray], padding: Sequence[int], dtype: type[np.generic]) -> np.ndarray:
    """Members with their zeros of padding after each; `padding` has one more, for the end."""
    pieces = []
    for member, zeros in zip(members, padding):
        pieces.append(member)
        if zeros:
            pieces.append(np.zeros(zeros, dtype))
    return np.concatenate([*pieces, np.zeros(padding[-1], dtype)])


def _count_by_sample(places: np.ndarray, whole: _Bin) -> tuple[int, ...]:
    """How many of some places, ascending, lie in each sample."""
    firsts = places.searchsorted(whole.cu_seqlens[: len(whole.samples) + 1]).tolist()
    return tuple(map(operator.sub, firsts[1:], firsts))


def _vision(whole: _Bin, places: np.ndarray, geometry: Geometry, part: RankSlice) -> dict[str, object]:
    if not part.has_vision:
        none = np.zeros(0, np.int64)
        return _images([], [], geometry) | _image_places(none, none, ImageShare((), 0, 0, none))
    merge, grids = geometry.spatial_merge_size, whole.grids
    share = share_images([t * h * w for t, h, w in grids], 1 / merge**2, part.vision_ranks, part.vision_rank)
    if not share.images:
        grids = [(1, merge, merge)]
        patches = [np.zeros((merge * merge, geometry.patch_bytes), np.uint8)]
    elif len(share.images) == len(grids):
        patches = [s.patches for s in whole.samples]
    else:
        images = _split_images(whole)
        patches, grids = [images[i] for i in share.images], [grids[i] for i in share.images]
    mine = places.reshape(part.sequence_ranks, -1)[part.sequence_rank]
    index, rows = _image_tokens(mine, whole, share.rows)
    return _images(patches, grids, geometry) | _image_places(index, rows, share)


def _split_images(whole: _Bin) -> list[np.ndarray]:
    """The patches of every image of the bin, as views."""
    images = []
    grids = iter(whole.grids)
    for sample in whole.samples:
        start = 0
        for _, (t, h, w) in zip(sample.image_grid_thw, grids):
            images.append(sample.patches[start : start + t * h * w])
            start += t * h * w
    return images


def _image_tokens(places: np.ndarray, whole: _Bin, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of some places are image tokens, and what each of those has in `rows`, (V,) of all of the bin."""
    if len(places) == len(whole.input_ids):
        return whole.slots, rows
    row_of = np.full(len(whole.input_ids), -1)
    row_of[whole.slots] = rows
    held = row_of.take(places)
    index = np.flatnonzero(held >= 0)
    return index, held.take(index)


def _image_places(index: np.ndarray, rows: np.ndarray, share: ImageShare) -> dict[str, object]:
    return {
        "image_index": torch.from_numpy(index),
        "image_rows": torch.from_numpy(rows),
        "encoded_rows": share.tokens,
        "gathered_rows": share.gathered_rows,
    }


def _images(images: Sequence[np.ndarray], grids: Sequence[Grid], geometry: Geometry) -> dict[str, object]:
    merge = geometry.spatial_merge_size
    taps, weights = position_interpolation(grids, geometry.position_side, merge)
    frames = [h * w for t, h, w in grids for _ in range(t)]
    patches = np.concatenate([np.empty((0, geometry.patch_bytes), np.uint8), *images])
    return {
        "patches": Ragged(torch.from_numpy(patches), tuple(frames)),
        "vision_cu_seqlens": torch.from_numpy(cumulative(frames)),
        "vision_max_seqlen": max(frames, default=0),
        "patch_coordinates": torch.from_numpy(patch_coordinates(grids, merge)),
        "position_taps": torch.from_numpy(taps),
        "position_weights": torch.from_numpy(weights),
    }
