"""MicroBatch: one rank's part of one bin as tensors. Padding, label shift, positions and slices are made here, once,
on the data worker."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from trainer.contract import IGNORE_INDEX
from trainer.positions import cumulative, mrope_positions, patch_coordinates, position_interpolation
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
    """Samples laid end to end, whole."""

    samples: Sequence[TokenizedSample]
    starts: np.ndarray
    cu_seqlens: np.ndarray
    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray
    is_image: np.ndarray


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
    labels = whole.labels[places]
    loss_index = np.flatnonzero(labels != IGNORE_INDEX)
    grids = np.concatenate([np.empty((0, 3), np.int64), *(s.image_grid_thw.astype(np.int64) for s in samples)])
    return MicroBatch(
        keys=tuple(s.key for s in samples),
        input_ids=torch.from_numpy(whole.input_ids[places])[None],
        position_ids=torch.from_numpy(whole.position_ids[:, places]),
        cu_seqlens=torch.from_numpy(whole.cu_seqlens),
        max_seqlen=int(np.diff(whole.cu_seqlens).max()),
        cp_order=torch.from_numpy(order),
        loss_index=torch.from_numpy(loss_index),
        labels=Ragged(torch.from_numpy(labels[loss_index]), _count_by_sample(places[loss_index], whole)),
        **_vision(whole, grids, places, geometry, part),
        sample_lengths=tuple(len(s.input_ids) for s in samples),
        image_patches=tuple(grids.prod(-1).tolist()),
        num_loss_tokens=int((whole.labels != IGNORE_INDEX).sum()),
    )


def _lay_out(samples: Sequence[TokenizedSample], geometry: Geometry, seq_len: int, pad_multiple: int) -> _Bin:
    lengths = np.array([len(s.input_ids) for s in samples], np.int64)
    padded = -(-lengths // pad_multiple) * pad_multiple
    if padded.sum() > seq_len:
        raise ValueError(
            f"samples of {int(padded.sum())} tokens do not fit in seq_len={seq_len}: {[s.key for s in samples]}"
        )
    tail = int(seq_len - padded.sum())
    cu_seqlens = cumulative([*padded.tolist(), *([tail] if tail else [])])
    starts = cu_seqlens[: len(samples)]
    whole = _Bin(
        samples,
        starts,
        cu_seqlens,
        input_ids=np.zeros(seq_len, np.int64),
        position_ids=np.zeros((3, seq_len), np.int64),
        labels=np.full(seq_len, IGNORE_INDEX, np.int64),
        is_image=np.zeros(seq_len, bool),
    )
    for sample, start in zip(samples, starts.tolist()):
        stop = start + len(sample.input_ids)
        whole.input_ids[start:stop] = sample.input_ids
        whole.is_image[start:stop] = sample.input_ids == geometry.image_token_id
        whole.position_ids[:, start:stop] = mrope_positions(
            sample.input_ids, sample.image_grid_thw, geometry.image_token_id, geometry.spatial_merge_size
        )
        # The one shift by one: place i predicts token i + 1 of the same sample where that token is to be learnt.
        whole.labels[start : stop - 1] = np.where(sample.loss_mask[1:], sample.input_ids[1:], IGNORE_INDEX)
    return whole


def _count_by_sample(places: np.ndarray, whole: _Bin) -> tuple[int, ...]:
    if not len(whole.samples):
        return ()
    sample = np.searchsorted(whole.starts, places, side="right") - 1
    return tuple(np.bincount(sample, minlength=len(whole.samples)).tolist())


def _vision(
    whole: _Bin, grids: np.ndarray, places: np.ndarray, geometry: Geometry, part: RankSlice
) -> dict[str, object]:
    if not part.has_vision:
        share = ImageShare((), 0, 0, np.empty(0, np.int64))
        return _images([], grids[:0], geometry) | _image_places(np.zeros(0, bool), np.zeros(0, np.int64), share)
    merge = geometry.spatial_merge_size
    share = share_images(grids.prod(-1).tolist(), 1 / merge**2, part.vision_ranks, part.vision_rank)
    images = _split_images(whole.samples)
    mine = places.reshape(part.sequence_ranks, -1)[part.sequence_rank]
    chosen, chosen_grids = [images[i] for i in share.images], grids[list(share.images)]
    if not chosen:
        chosen_grids = np.array([[1, merge, merge]])
        chosen = [np.zeros((merge * merge, geometry.patch_bytes), np.uint8)]
    number = np.cumsum(whole.is_image) - 1
    return _images(chosen, chosen_grids, geometry) | _image_places(whole.is_image[mine], number[mine], share)


def _split_images(samples: Sequence[TokenizedSample]) -> list[np.ndarray]:
    """The patches of every image of the bin, as views."""
    images = []
    for sample in samples:
        bounds = np.cumsum(sample.image_grid_thw.astype(np.int64).prod(-1))[:-1]
        images += np.split(sample.patches, bounds) if len(sample.image_grid_thw) else []
    return images


def _image_places(is_image: np.ndarray, number: np.ndarray, share: ImageShare) -> dict[str, object]:
    index = np.flatnonzero(is_image)
    return {
        "image_index": torch.from_numpy(index),
        "image_rows": torch.from_numpy(share.rows[number[index]]),
        "encoded_rows": share.tokens,
        "gathered_rows": share.gathered_rows,
    }


def _images(images: list[np.ndarray], grids: np.ndarray, geometry: Geometry) -> dict[str, object]:
    merge = geometry.spatial_merge_size
    taps, weights = position_interpolation(grids, geometry.position_side, merge)
    frames = np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0])
    patches = np.concatenate([np.empty((0, geometry.patch_bytes), np.uint8), *images])
    return {
        "patches": Ragged(torch.from_numpy(patches), tuple(frames.tolist())),
        "vision_cu_seqlens": torch.from_numpy(cumulative(frames)),
        "vision_max_seqlen": int(frames.max(initial=0)),
        "patch_coordinates": torch.from_numpy(patch_coordinates(grids, merge)),
        "position_taps": torch.from_numpy(taps),
        "position_weights": torch.from_numpy(weights),
    }
