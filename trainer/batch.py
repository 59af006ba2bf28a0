"""MicroBatch: one rank's part of one bin. Padding, label shift and slices are made here, once, on the data worker, and
all from which positions follow."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from trainer.block import Spans, joined
from trainer.positions import (
    FRAME_COLUMNS,
    RUN_COLUMNS,
    PatchPositions,
    Raster,
    image_rows,
    image_starts,
    patch_positions,
    rasters,
    token_positions,
    token_runs,
)
from trainer.ragged import Ragged
from trainer.slices import WHOLE, ImageShare, RankSlice, held_places, share_images


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
    loss tokens, P = patches, F = frames and G = images this rank encodes, V = image tokens that lie in its s, n =
    segments.

    A rank that has no image to encode carries one blank image of merge x merge patches whose token goes nowhere, so
    that the vision encoder takes part in every step on every rank and its gradients are zero rather than missing.

    All integers that a device is to have lie in one tensor, allocated, pinned and moved at once. What the model takes
    are the properties: views, or made from views where the batch lies, anew each time and without waiting for a device.

    Attributes:
        keys: the samples, in order.
        numbers: int64, the parts named in `spans`.
        spans: where each part begins and ends in `numbers`.
        max_seqlen: the longest segment.
        loss_lengths: loss tokens of each sample in t.
        patches: a member an image (a frame, where it has several), (P, 3 * patch_size^2) uint8 in all.
        sequence_begin: where s begins in t.
        encoded_rows: image tokens that this rank encodes; a blank image's is not counted.
        gathered_rows: rows that each rank gives to the gathered image tokens.
        vision_max_seqlen: patches of the largest image.
        geometry: what the model's patches are like.
        sample_lengths: tokens of each sample of the bin, without padding.
        image_patches: patches of each image of the bin.
        num_loss_tokens: loss tokens of the bin, over all ranks.
        num_slots: T.
    """

    keys: tuple[str, ...]
    numbers: torch.Tensor
    spans: Spans
    max_seqlen: int
    loss_lengths: tuple[int, ...]
    patches: Ragged
    sequence_begin: int
    encoded_rows: int
    gathered_rows: int
    vision_max_seqlen: int
    geometry: Geometry
    sample_lengths: tuple[int, ...]
    image_patches: tuple[int, ...]
    num_loss_tokens: int
    num_slots: int

    def _part(self, name: str) -> torch.Tensor:
        begin, end = self.spans.get(name, (0, 0))
        return self.numbers[begin:end]

    def _runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._part("runs").view(-1, RUN_COLUMNS), self._part("run_starts")

    @property
    def input_ids(self) -> torch.Tensor:
        """(1, t) int64; a view."""
        return self._part("input_ids")[None]

    @property
    def position_ids(self) -> torch.Tensor:
        """(3, t) int64 mrope positions, from 0 in every sample."""
        is_part = "places" in self.spans
        places = self._part("places") if is_part else torch.arange(self.num_slots, device=self.numbers.device)
        return token_positions(*self._runs(), places)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """(n + 1,) int32 cumulative lengths of the segments of the whole bin: each sample with its own padding (which
        no real token sees, for it comes last and attention is causal), then the padding at the end."""
        return self._part("cu_seqlens").int()

    @property
    def loss_index(self) -> torch.Tensor:
        """(N,) int64 places in t whose logits are needed; a view."""
        return self._part("loss_index")

    @property
    def labels(self) -> Ragged:
        """A member a sample, (N,) int64 in all: the token to be predicted there, the next one of the same sample."""
        return Ragged(self._part("labels"), self.loss_lengths)

    @property
    def image_index(self) -> torch.Tensor:
        """(V,) int64 places in s of image tokens; a view."""
        return self._part("image_index")

    @property
    def image_rows(self) -> torch.Tensor:
        """(V,) int64 their rows among the image tokens gathered from all ranks that encode."""
        places = self.image_index
        if self.sequence_begin:
            places = places + self.sequence_begin
        if "places" in self.spans:
            places = self._part("places").index_select(0, places)
        return image_rows(*self._runs(), places)

    @property
    def vision_cu_seqlens(self) -> torch.Tensor:
        """(F + 1,) int32 patches of each frame, cumulative."""
        return self._part("vision_cu_seqlens").int()

    def patch_positions(self) -> PatchPositions:
        """Of the P patches."""
        frames, cu_patches = self._part("frames").view(-1, FRAME_COLUMNS), self._part("vision_cu_seqlens")
        side, merge = self.geometry.position_side, self.geometry.spatial_merge_size
        return patch_positions(frames, cu_patches, len(self.patches.values), side, merge)

    @property
    def num_tokens(self) -> int:
        return sum(self.sample_lengths)

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


_NO_SHARE = ImageShare((), 0, 0, ())


@dataclass(slots=True)
class _Bin:
    """Samples laid end to end, whole. A segment is a sample with its padding, or the padding at the end.

    Attributes:
        lengths: tokens of each sample.
        padding: tokens after each, and at the end.
        bounds: (m + 1) where each segment begins, and the end.
        images: of each sample.
        ids: (T,) int32.
        is_loss: (T,) the next token of the same sample is to be learnt.
        is_image: (T,) this is an image token.
    """

    samples: Sequence[TokenizedSample]
    keys: tuple[str, ...]
    lengths: list[int]
    padding: list[int]
    bounds: list[int]
    images: list[tuple[Raster, ...]]
    ids: np.ndarray
    is_loss: np.ndarray
    is_image: np.ndarray


def make_micro_batch(
    samples: Sequence[TokenizedSample], geometry: Geometry, seq_len: int, part: RankSlice = WHOLE
) -> MicroBatch:
    """Lay samples end to end in `seq_len` tokens and take a rank's part; no samples make a bin of padding.

    Raises:
        ValueError: the samples do not fit, or a sample's image tokens are not those of its grids.
    """
    whole = _lay_out(samples, geometry, seq_len, part.pad_multiple)
    images = [*chain.from_iterable(whole.images)]
    image_patches = [image.patches for image in images]
    share = _NO_SHARE
    if part.has_vision:
        share = share_images(image_patches, geometry.spatial_merge_size**2, part.vision_ranks, part.vision_rank)
    loss_lengths, lists, arrays = _tokens(whole, share, geometry, part)
    encoded, patches = _encoded(whole, images, share, geometry) if part.has_vision else ([], [])
    frames = [*chain.from_iterable([image.frame_patches for image in encoded])]
    lists["vision_cu_seqlens"] = [*accumulate(frames, initial=0)]
    lists["frames"] = [*chain.from_iterable([image.frames for image in encoded])]
    numbers, spans = joined(lists, arrays)
    pixels = np.concatenate(patches or [np.empty((0, geometry.patch_bytes), np.uint8)])
    return MicroBatch(
        keys=whole.keys,
        numbers=torch.from_numpy(numbers),
        spans=spans,
        max_seqlen=max(map(operator.sub, whole.bounds[1:], whole.bounds)),
        loss_lengths=loss_lengths,
        patches=Ragged(torch.from_numpy(pixels), tuple(frames)),
        vision_max_seqlen=max(frames, default=0),
        sequence_begin=part.sequence_rank * seq_len // (part.cp * part.sequence_ranks),
        encoded_rows=share.tokens,
        gathered_rows=share.gathered_rows,
        geometry=geometry,
        sample_lengths=tuple(whole.lengths),
        image_patches=tuple(image_patches),
        num_loss_tokens=int(np.count_nonzero(whole.is_loss)),
        num_slots=seq_len,
    )


def _lay_out(samples: Sequence[TokenizedSample], geometry: Geometry, seq_len: int, pad_multiple: int) -> _Bin:
    lengths = [len(s.input_ids) for s in samples]
    padding = [-length % pad_multiple for length in lengths]
    bounds = [*accumulate(map(operator.add, lengths, padding), initial=0)]
    if bounds[-1] > seq_len:
        raise ValueError(f"samples of {bounds[-1]} tokens do not fit in seq_len={seq_len}: {[s.key for s in samples]}")
    padding.append(seq_len - bounds[-1])
    ids, is_loss = np.zeros(seq_len, np.int32), np.zeros(seq_len, np.bool_)
    for sample, begin, length in zip(samples, bounds, lengths):
        last = begin + length - 1
        ids[begin : last + 1] = sample.input_ids
        # The one shift by one: place i predicts token i + 1 of the same sample where that token is to be learnt.
        is_loss[begin:last] = sample.loss_mask[1:]
    if padding[-1]:
        bounds.append(seq_len)
    merge = geometry.spatial_merge_size
    images = [rasters(s.image_grid_thw.tobytes(), merge) for s in samples]
    keys = tuple([s.key for s in samples])
    return _Bin(samples, keys, lengths, padding, bounds, images, ids, is_loss, ids == geometry.image_token_id)


def _tokens(
    whole: _Bin, share: ImageShare, geometry: Geometry, part: RankSlice
) -> tuple[tuple[int, ...], dict[str, Sequence[int]], dict[str, np.ndarray]]:
    """How many loss tokens of each sample lie in t, and what `numbers` says of tokens: short lists, and arrays."""
    sample_bounds = whole.bounds[: len(whole.samples) + 1]
    starts = image_starts(whole.is_image, whole.images, sample_bounds, whole.keys)
    rows = share.first_rows if part.has_vision else [0] * len(starts)
    runs = token_runs(whole.images, starts, whole.lengths, whole.padding, rows)
    lists = {"cu_seqlens": whole.bounds, "run_starts": runs[::RUN_COLUMNS], "runs": runs}
    if part.cp == 1:
        loss_index = whole.is_loss.nonzero()[0]
        arrays = {"input_ids": whole.ids, "labels": whole.ids[1:].take(loss_index)}
    else:
        places = held_places(whole.bounds, part.cp, part.cp_rank)
        loss_index = whole.is_loss.take(places).nonzero()[0]
        labels = whole.ids[1:].take(places.take(loss_index))
        arrays = {"input_ids": whole.ids.take(places), "labels": labels, "places": places}
    arrays["loss_index"] = loss_index
    if part.cp == part.sequence_ranks == 1 and part.has_vision:
        arrays["image_index"] = whole.is_image.nonzero()[0]
    elif part.has_vision:
        held = arrays["input_ids"].reshape(part.sequence_ranks, -1)[part.sequence_rank]
        arrays["image_index"] = (held == geometry.image_token_id).nonzero()[0]
    firsts = loss_index.searchsorted([bound // part.cp for bound in sample_bounds]).tolist()
    return tuple(map(operator.sub, firsts[1:], firsts)), lists, arrays


def _encoded(
    whole: _Bin, images: list[Raster], share: ImageShare, geometry: Geometry
) -> tuple[list[Raster], list[np.ndarray]]:
    """Those of a bin's images that a rank encodes, and their patches."""
    if not share.images:
        merge = geometry.spatial_merge_size
        blank = np.array([1, merge, merge], np.int32)
        return [*rasters(blank.tobytes(), merge)], [np.zeros((merge * merge, geometry.patch_bytes), np.uint8)]
    if len(share.images) == len(images):
        return images, [s.patches for s in whole.samples]
    return [images[i] for i in share.images], _split_images(whole, share)


def _split_images(whole: _Bin, share: ImageShare) -> list[np.ndarray]:
    """The patches of a share's images, as views."""
    patches, chosen, number = [], {*share.images}, 0
    for sample, images in zip(whole.samples, whole.images):
        start = 0
        for image in images:
            if number in chosen:
                patches.append(sample.patches[start : start + image.patches])
            start += image.patches
            number += 1
    return patches
