"""MicroBatch: one bin as tensors. Padding, label shift and positions are made here, once, on the data worker."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from trainer.positions import cumulative, mrope_positions, patch_coordinates, position_interpolation


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a micro batch must know of the model: a few integers of config.json."""

    image_token_id: int
    spatial_merge_size: int
    position_side: int
    patch_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MicroBatch:
    """One bin. T = seq_len, N = loss tokens, P = patches, V = image tokens, G = images, n = segments.

    A bin without an image carries one blank image of merge x merge patches that no token looks at, so that the
    vision encoder takes part in every step on every rank and its gradients are zero rather than missing.

    Attributes:
        keys: the samples, in order.
        input_ids: (1, T) int64.
        position_ids: (3, T) int64 mrope positions, from 0 in every sample.
        cu_seqlens: (n + 1,) int32 cumulative lengths of the samples, and of the padding at the end as one more.
        cu_seqlens_padded: the same with each sample padded to the multiple: where it physically starts.
        has_gaps: some sample is padded inside the bin, so that the two differ.
        max_seqlen: the longest padded segment.
        loss_index: (N,) int64 places in T whose logits are needed.
        labels: (N,) int64 the token to be predicted there: the next one of the same sample.
        patches: (P, 3 * patch_size^2) uint8.
        image_index: (V,) int64 places in T of the image tokens.
        vision_cu_seqlens: (G + 1,) int32 patches of each image, cumulative.
        vision_max_seqlen: patches of the largest image.
        patch_coordinates: (P, 2) int64 row and column.
        position_taps: (P, 4) int64 rows of the table of learned positions.
        position_weights: (P, 4) float32.
        sample_lengths: tokens of each sample, without padding.
        image_patches: patches of each real image.
    """

    keys: tuple[str, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    has_gaps: bool
    max_seqlen: int
    loss_index: torch.Tensor
    labels: torch.Tensor
    patches: torch.Tensor
    image_index: torch.Tensor
    vision_cu_seqlens: torch.Tensor
    vision_max_seqlen: int
    patch_coordinates: torch.Tensor
    position_taps: torch.Tensor
    position_weights: torch.Tensor
    sample_lengths: tuple[int, ...]
    image_patches: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.sample_lengths)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.labels)

    def _map(self, change) -> "MicroBatch":
        names = [f.name for f in dataclasses.fields(self)]
        tensors = {n: getattr(self, n) for n in names if isinstance(getattr(self, n), torch.Tensor)}
        return dataclasses.replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def to(self, device: torch.device) -> "MicroBatch":
        """The same batch on `device`, copied asynchronously where pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """The same batch in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)


def make_micro_batch(
    samples: Sequence[TokenizedSample], geometry: Geometry, seq_len: int, pad_multiple: int = 1
) -> MicroBatch:
    """Lay samples end to end in `seq_len` tokens.

    Raises:
        ValueError: the samples do not fit, or a sample's image tokens are not those of its grids.
    """
    lengths = np.array([len(s.input_ids) for s in samples], np.int64)
    padded = -(-lengths // pad_multiple) * pad_multiple
    if padded.sum() > seq_len:
        raise ValueError(
            f"samples of {int(padded.sum())} tokens do not fit in seq_len={seq_len}: {[s.key for s in samples]}"
        )
    starts = cumulative(padded)[:-1]
    tail = int(seq_len - padded.sum())
    segments = [*lengths.tolist(), *([tail] if tail else [])]
    padded_segments = [*padded.tolist(), *([tail] if tail else [])]
    loss_index, labels = _labels(samples, starts)
    return MicroBatch(
        keys=tuple(s.key for s in samples),
        **_tokens(samples, starts, geometry, seq_len),
        cu_seqlens=torch.from_numpy(cumulative(segments)),
        cu_seqlens_padded=torch.from_numpy(cumulative(padded_segments)),
        has_gaps=segments != padded_segments,
        max_seqlen=max(padded_segments),
        loss_index=torch.from_numpy(loss_index),
        labels=torch.from_numpy(labels),
        **_vision(samples, geometry),
        sample_lengths=tuple(lengths.tolist()),
    )


def _tokens(samples, starts: np.ndarray, geometry: Geometry, seq_len: int) -> dict[str, torch.Tensor]:
    input_ids = np.zeros(seq_len, np.int64)
    position_ids = np.zeros((3, seq_len), np.int64)
    image_index = [np.empty(0, np.int64)]
    for sample, start in zip(samples, starts.tolist()):
        stop = start + len(sample.input_ids)
        input_ids[start:stop] = sample.input_ids
        position_ids[:, start:stop] = mrope_positions(
            sample.input_ids, sample.image_grid_thw, geometry.image_token_id, geometry.spatial_merge_size
        )
        image_index.append(np.flatnonzero(sample.input_ids == geometry.image_token_id) + start)
    return {
        "input_ids": torch.from_numpy(input_ids)[None],
        "position_ids": torch.from_numpy(position_ids),
        "image_index": torch.from_numpy(np.concatenate(image_index)),
    }


def _labels(samples: Sequence[TokenizedSample], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The one shift by one: place i predicts token i + 1 of the same sample where that token is to be learnt."""
    index, labels = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for sample, start in zip(samples, starts.tolist()):
        learnt = np.flatnonzero(sample.loss_mask[1:])
        index.append(learnt + start)
        labels.append(sample.input_ids[1:][learnt].astype(np.int64))
    return np.concatenate(index), np.concatenate(labels)


def _vision(samples: Sequence[TokenizedSample], geometry: Geometry) -> dict[str, object]:
    merge = geometry.spatial_merge_size
    grids = np.concatenate([np.empty((0, 3), np.int64), *(s.image_grid_thw.astype(np.int64) for s in samples)])
    patches = np.concatenate([np.empty((0, geometry.patch_bytes), np.uint8), *(s.patches for s in samples)])
    image_patches = tuple(grids.prod(-1).tolist())
    if not len(grids):
        grids, patches = np.array([[1, merge, merge]]), np.zeros((merge * merge, geometry.patch_bytes), np.uint8)
    taps, weights = position_interpolation(grids, geometry.position_side, merge)
    frames = np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0])
    return {
        "patches": torch.from_numpy(patches),
        "vision_cu_seqlens": torch.from_numpy(cumulative(frames)),
        "vision_max_seqlen": int(frames.max()),
        "patch_coordinates": torch.from_numpy(patch_coordinates(grids, merge)),
        "position_taps": torch.from_numpy(taps),
        "position_weights": torch.from_numpy(weights),
        "image_patches": image_patches,
    }
