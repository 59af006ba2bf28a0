"""MicroBatch: one rank's part of one bin.

Padding, positions, label shift and slices are computed here, once, by the data worker. Here and in the code behind it a
temporal group of a video is an image, but for its second frame (`later_patches`): it has a grid, positions and
deepstack features of its own, and its patches attend to no other group's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from dataset_builders.contracts.tokenized import GROUP_FRAMES, TokenizedSample
from trainer.data.packed_chunks import PackedChunks
from trainer.data.slices import NO_IMAGES, WHOLE, ImageShare, RankSlice, joined_ranges, share_images, zigzag_order
from trainer.model.shape import ModelShape

# (tokens of a sample, start index of each image, each image's grid in tokens) -> (3, n) positions
Positions = Callable[[int, Sequence[int], Sequence[Sequence[int]]], np.ndarray]
# indices of images in the bin -> (tokens, (1 + L) * D) their concatenated features
Features = Callable[[Sequence[int]], torch.Tensor]
# Not needed up to the backward pass, as the small ones are: they have memory of their own, which is freed sooner.
LARGE = ("patches", "later_patches", "features")


def mrope_positions(length: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return (3, n) int64 positions on the axes time, row and column, from 0: those of `get_rope_index` of transformers
    5.23, models/qwen3_vl/modeling_qwen3_vl.py. A family with other positions sets its own function in its `Geometry`.

    Text counts up on all three axes. An image's tokens form a grid that starts at the next position after the text
    before it, and the text continues after the grid's longer side. Without images the three rows are equal.

    Args:
        starts: index of the first token of each image.
        grids: (t, h, w) of each image, in tokens.
    """
    positions = np.empty((3, length), np.int64)
    positions[:] = np.arange(length)
    for start, (frames, rows, columns) in zip(starts, grids):
        stop = start + frames * rows * columns
        positions[:, start:stop] = positions[0, start] + np.indices((frames, rows, columns)).reshape(3, -1)
        positions[:, stop:] += max(rows, columns) - (stop - start)
    return positions


@dataclass(frozen=True, slots=True)
class Geometry:
    """The facts of a model that its micro batches need. The default is a text-only model."""

    # the id that marks an image token in input_ids; None if the model takes no images
    image_token_id: int | None = None
    spatial_merge_size: int = 1  # a square of patches with this side becomes one image token
    patch_bytes: int = 0  # bytes of one patch of one frame: 3 * patch_size^2
    video_token_id: int | None = None  # marks a token of a video's temporal group; None if the model takes no videos
    positions: Positions = mrope_positions  # computes the positions of one sample
    in_chunks: bool = False  # whether some layers take a bin's segments in chunks
    marks_padding: bool = False  # whether some layers must know which tokens are padding
    predicts_second: bool = False  # whether the token after the next is predicted too


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MicroBatch:
    """One rank's part of one bin.

    T = tokens of the bin, t = tokens of this rank after context parallelism, s = tokens of this rank after sequence
    parallelism, N = this rank's loss tokens, P = patches and F = frames that this rank encodes (of a temporal group
    only the first is counted), Q = patches of temporal groups among the P, V = image tokens among the s, n = segments.

    A rank without images to encode gets one blank image of merge x merge patches, whose token is not used. So the
    vision encoder takes part in every step on every rank, and its gradients are zero rather than missing. A text-only
    model, and a rank without a vision encoder, get no blank image: all fields about images are empty. A rank that reads
    features gets the features of the images that it would encode; its fields about patches are empty.
    """

    keys: tuple[str, ...]  # keys of the samples, in order
    input_ids: torch.Tensor  # (1, t) int64
    position_ids: torch.Tensor  # (3, t) int64, from 0 in every sample, 0 in padding
    # (n + 1,) int32 cumulative lengths of the segments of the whole bin: each sample with its own padding (which comes
    # last, so that with causal attention no real token sees it), then the padding at the end
    cu_seqlens: torch.Tensor
    max_seqlen: int  # length of the longest segment
    # (T,) int64 indices of the bin's tokens, in the order in which context-parallel ranks hold them; empty if one rank
    # holds the whole bin
    cp_order: torch.Tensor
    chunks: PackedChunks | None  # the segments of the whole bin in chunks; None if no layer needs chunks
    # (t,) bool: whether a place holds a token of a sample and not padding; empty if no layer needs it
    is_token: torch.Tensor
    loss_index: torch.Tensor  # (N,) int64 indices into the t tokens whose logits are needed
    labels: torch.Tensor  # (N,) int64 the token to predict at each loss_index: the next token of the same sample
    loss_lengths: tuple[int, ...]  # number of loss tokens of each sample among the t
    image_index: torch.Tensor  # (V,) int64 indices of image tokens among the s
    # (V,) int64 row of each of these among the image tokens gathered from all ranks that encode
    image_rows: torch.Tensor
    encoded_rows: int  # number of image tokens that this rank encodes, without a blank image's
    # number of image tokens from each other rank that encodes for this rank; they follow its own
    arriving_rows: tuple[int, ...]
    gathered_rows: int  # number of rows that each rank contributes to the gathered image tokens
    patches: torch.Tensor  # (P, 3 * patch_size^2) uint8: images, and the first frames of temporal groups
    later_patches: torch.Tensor  # (Q, 3 * patch_size^2) uint8: the second frames of temporal groups
    later_rows: torch.Tensor  # (Q,) int64 the row of `patches` that has the same place in the first frame
    patch_coordinates: torch.Tensor  # (P, 2) int32 row and column of each patch in its frame
    patch_frames: torch.Tensor  # (P, 2) int32 numbers of rows and columns of each patch's frame, in patches
    vision_cu_seqlens: torch.Tensor  # (F + 1,) int32 cumulative number of patches of the frames
    vision_max_seqlen: int  # number of patches of the largest frame
    sample_lengths: tuple[int, ...]  # number of tokens of each sample of the bin, without padding
    image_patches: tuple[int, ...]  # number of patches of each image of the bin
    num_loss_tokens: int  # number of loss tokens of the bin, over all ranks
    num_slots: int  # T
    # (1, t) int64 the next token of the same sample; a sample's last token has its own id. This field and the next four
    # are empty unless the token after the next is predicted.
    next_ids: torch.Tensor
    # as `image_index` and `image_rows`, for `next_ids`
    next_image_index: torch.Tensor
    next_image_rows: torch.Tensor
    second_index: torch.Tensor  # (M,) int64 indices into the t tokens whose token after the next is predicted
    second_labels: torch.Tensor  # (M,) int64 the token to predict at each second_index
    # (encoded_rows + arriving_rows, (1 + L) * D) image tokens, each with its features of L deepstack levels, if they
    # are already encoded; None if the model encodes the patches
    features: torch.Tensor | None = None
    are_features_read: bool = False  # whether the features were encoded before the training and are read
    # the memory of all tensors but the large ones, if they share it; None after the copy to a device
    small: "OneCopy | None" = None

    @property
    def num_tokens(self) -> int:
        return sum(self.sample_lengths)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are copied to a device, by name; of `chunks` the table."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tables = {} if self.chunks is None else {"chunks": self.chunks.table}
        return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)} | tables

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the same batch on `device`, copied asynchronously if pinned."""
        # The views of one piece of memory are made again on the device, after a single copy.
        small = {} if self.small is None else self.small.to(device).views()
        others = {name: tensor for name, tensor in self.tensors().items() if name not in small}
        return self._with(small | {name: tensor.to(device, non_blocking=True) for name, tensor in others.items()})

    def packed(self, *, pin: bool) -> "MicroBatch":
        """Return the same batch with all tensors but the large ones in one piece of memory, page-locked if `pin`, so
        that a few copies bring it to a device in place of twenty."""
        tensors = self.tensors()
        large = {name: tensors.pop(name) for name in LARGE if name in tensors and len(tensors[name])}
        small = OneCopy.of(tensors, pin=pin)
        large = {name: tensor.pin_memory() if pin else tensor for name, tensor in large.items()}
        return self._with(small.views() | large, small)

    def _with(self, tensors: Mapping[str, torch.Tensor], small: "OneCopy | None" = None) -> "MicroBatch":
        chunks = None if self.chunks is None else self.chunks.with_table(tensors["chunks"])
        return dataclasses.replace(self, **{**tensors, "chunks": chunks, "small": small})


def make_micro_batch(
    samples: Sequence[TokenizedSample],
    geometry: Geometry,
    seq_len: int,
    part: RankSlice = WHOLE,
    features: Features | None = None,
) -> MicroBatch:
    """Return a rank's part of the samples, concatenated in `seq_len` tokens; without samples all is padding.

    Args:
        features: reads the features of images; then the samples need no patches.

    Raises:
        ValueError: the samples do not fit, or a sample's image tokens do not match its grids or its features.
    """
    bounds = _segment_bounds(samples, seq_len, part.pad_multiple)
    whole = _lay_out(samples, geometry, bounds)
    order = zigzag_order(bounds, part.cp)
    # This rank's tokens, as indices into the bin. Every rank has as many, so that a reshape divides them.
    places = order.reshape(part.cp, -1)[part.cp_rank]
    held = places if geometry.predicts_second else places[:0]
    second_index = np.flatnonzero(whole.is_second[held])
    loss_index = np.flatnonzero(whole.is_loss[places])
    sample_bounds = np.array(bounds[: len(samples) + 1])
    # A rank holds 1 / cp of each segment, segment after segment, so a sample's tokens begin at its start / cp.
    loss_bounds = loss_index.searchsorted(sample_bounds // part.cp)
    grids = np.concatenate([np.empty((0, 3), np.int32), *(s.image_grid_thw for s in samples)])
    return MicroBatch(
        keys=tuple(s.key for s in samples),
        input_ids=torch.from_numpy(whole.ids[places])[None],
        position_ids=torch.from_numpy(whole.positions.take(places, axis=1)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=int(np.diff(bounds).max()),
        # What no layer needs is an empty slice: fewer bytes to copy, and one type for all cases.
        cp_order=torch.from_numpy(order if part.cp > 1 else order[:0]),
        chunks=PackedChunks.of(bounds) if geometry.in_chunks else None,
        is_token=torch.from_numpy(whole.is_token[places if geometry.marks_padding else places[:0]]),
        loss_index=torch.from_numpy(loss_index),
        # A loss token is never the last of its sample, so its label is at the next place of the bin.
        labels=torch.from_numpy(whole.ids[places[loss_index] + 1]),
        loss_lengths=tuple(np.diff(loss_bounds).tolist()),
        **_vision_fields(samples, grids, whole, (places, whole.next[held]), geometry, part, features),
        next_ids=torch.from_numpy(whole.ids[whole.next[held]])[None],
        second_index=torch.from_numpy(second_index),
        second_labels=torch.from_numpy(whole.ids[held[second_index] + 2]),
        are_features_read=features is not None,
        sample_lengths=tuple(len(s.input_ids) for s in samples),
        image_patches=tuple(grids.prod(1).tolist()),
        num_loss_tokens=int(np.count_nonzero(whole.is_loss)),
        num_slots=seq_len,
    )


def _segment_bounds(samples: Sequence[TokenizedSample], seq_len: int, pad_multiple: int) -> list[int]:
    """Return the start index of each segment, and the end of the last segment. A segment is a sample with its padding,
    or the padding at the end."""
    bounds = [*accumulate([-(-len(s.input_ids) // pad_multiple) * pad_multiple for s in samples], initial=0)]
    if bounds[-1] > seq_len:
        raise ValueError(f"samples of {bounds[-1]} tokens do not fit in seq_len={seq_len}: {[s.key for s in samples]}")
    return bounds if bounds[-1] == seq_len else [*bounds, seq_len]


class _Bin(NamedTuple):
    """Concatenated whole samples."""

    ids: np.ndarray  # (T,) int64
    positions: np.ndarray  # (3, T) int64
    is_loss: np.ndarray  # (T,) bool: whether the next token of the same sample is trained on
    is_token: np.ndarray  # (T,) bool: whether the place is not padding
    # (T,) int64 place of the next token of the same sample; of the last token, and of padding, its own
    next: np.ndarray
    is_second: np.ndarray  # (T,) bool: whether the token after the next of the same sample is trained on


def _lay_out(samples: Sequence[TokenizedSample], geometry: Geometry, bounds: Sequence[int]) -> _Bin:
    size, merge = bounds[-1], geometry.spatial_merge_size
    ids, positions, flags = np.zeros(size, np.int64), np.zeros((3, size), np.int64), np.zeros((3, size), bool)
    whole = _Bin(ids, positions, flags[0], flags[1], np.arange(size), flags[2])
    for sample, begin in zip(samples, bounds):
        end = begin + len(sample.input_ids)
        whole.ids[begin:end], whole.is_token[begin:end] = sample.input_ids, True
        # The only shift by one: token i predicts token i + 1 of the same sample, if token i + 1 is trained on.
        whole.is_loss[begin : end - 1] = sample.loss_mask[1:]
        grids = (sample.image_grid_thw // (1, merge, merge)).tolist()
        starts = _image_starts(sample, grids, geometry)
        whole.positions[:, begin:end] = geometry.positions(end - begin, starts, grids)
        # Tokens before the last; the last of a sample, and padding, keep their own place.
        whole.next[begin : end - 1] += 1
        whole.is_second[begin : max(begin, end - 2)] = sample.loss_mask[2:]
    return whole


def _is_image(ids: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return whether each token is of an image or of a temporal group."""
    images = ids == geometry.image_token_id
    return images if geometry.video_token_id is None else images | (ids == geometry.video_token_id)


def _image_starts(sample: TokenizedSample, grids: list[list[int]], geometry: Geometry) -> list[int]:
    """Return the index in a sample of the first token of each image, given the (t, h, w) of each image in tokens."""
    if geometry.image_token_id is None and grids:
        raise ValueError(f"{sample.key}: {len(grids)} images, but the model takes text alone; leave the sample out")
    if geometry.image_token_id is None:
        return []
    if geometry.video_token_id is None and sample.is_video.any():
        raise ValueError(f"{sample.key}: it has a video, but the model takes none; leave the sample out")
    places = np.flatnonzero(_is_image(sample.input_ids, geometry))
    counts = np.array([t * h * w for t, h, w in grids], np.int64)
    stops = counts.cumsum()
    total, patches = int(counts.sum()), sample.image_grid_thw.tolist()
    if len(places) != total:
        wrong = f"{len(places)} image tokens, but its grids {patches} make {total}"
        raise ValueError(f"{sample.key}: {wrong}; tokenize it again")
    starts = places[stops - counts]
    if (places[stops - 1] - starts >= counts).any():
        wrong = f"other tokens lie between the {total} image tokens of its grids {patches}"
        raise ValueError(f"{sample.key}: {wrong}; tokenize it again")
    if ((sample.input_ids[places] == geometry.image_token_id) == np.repeat(sample.is_video, counts)).any():
        wrong = f"tokens of images stand for a video of its grids {patches}, or a video's for an image"
        raise ValueError(f"{sample.key}: {wrong}; tokenize it again")
    return starts.tolist()


def _vision_fields(
    samples: Sequence[TokenizedSample],
    grids: np.ndarray,
    whole: _Bin,
    held: tuple[np.ndarray, np.ndarray],
    geometry: Geometry,
    part: RankSlice,
    features: Features | None,
) -> dict[str, torch.Tensor | int | tuple[int, ...] | None]:
    """Return the fields about images; all are empty if the rank has no vision encoder.

    Args:
        grids: (G, 3) grids of all images of the bin, in patches.
        held: (t,) indices of the bin's tokens that this rank holds, and of their next tokens.
    """
    merge, share = geometry.spatial_merge_size, NO_IMAGES
    image_rows, next_rows = np.empty(0, np.int64), np.empty(0, np.int64)
    image_index, next_index = image_rows, next_rows
    no_patches = np.empty((0, geometry.patch_bytes), np.uint8)
    encoded, read = _Encoded(grids[:0], np.empty(0, bool), no_patches, no_patches), None
    if part.has_vision and geometry.image_token_id is not None:
        image_patches = grids.prod(1)
        share = share_images(image_patches.tolist(), merge**2, part)
        # The gathered row of each image token of the bin; -1 for every other token.
        # The image tokens of a bin stand in the order of its images, which `joined_ranges` follows.
        row_at = np.full(len(whole.ids), -1)
        first_rows = np.array(share.first_rows, np.int64)
        row_at[_is_image(whole.ids, geometry)] = joined_ranges(first_rows, image_patches // merge**2)
        rows = [row_at[places.reshape(part.sequence_ranks, -1)[part.sequence_rank]] for places in held]
        image_index, next_index = (np.flatnonzero(own >= 0) for own in rows)
        image_rows, next_rows = rows[0][image_index], rows[1][next_index]
        if features is not None:
            read = features(share.images)
            if len(read) != share.tokens:
                wrong = f"{len(read)} rows of features for images of {share.tokens} tokens"
                raise ValueError(f"{[sample.key for sample in samples]}: {wrong}; run the encode_images stage again")
        elif part.has_pixels:
            encoded = _encoded(samples, grids, share, geometry)
    frames = np.repeat(encoded.grids[:, 1:], encoded.grids[:, 0], axis=0)
    sizes = frames.prod(1)
    return {
        "image_index": torch.from_numpy(image_index),
        "image_rows": torch.from_numpy(image_rows),
        "next_image_index": torch.from_numpy(next_index),
        "next_image_rows": torch.from_numpy(next_rows),
        "encoded_rows": share.tokens,
        "arriving_rows": share.arriving_tokens,
        "gathered_rows": share.gathered_rows,
        "patches": torch.from_numpy(encoded.patches),
        "later_patches": torch.from_numpy(encoded.later_patches),
        "later_rows": torch.from_numpy(np.flatnonzero(np.repeat(encoded.is_video, encoded.grids.prod(1)))),
        "patch_coordinates": torch.from_numpy(patch_coordinates(frames, merge)),
        "patch_frames": torch.from_numpy(np.repeat(frames, sizes, axis=0)),
        "vision_cu_seqlens": torch.tensor([0, *sizes.cumsum()], dtype=torch.int32),
        "vision_max_seqlen": int(sizes.max(initial=0)),
        "features": read,
    }


class _Encoded(NamedTuple):
    """The images that a rank encodes."""

    grids: np.ndarray  # (G, 3) int32
    is_video: np.ndarray  # (G,) bool
    patches: np.ndarray  # (P, 3 * patch_size^2) uint8
    later_patches: np.ndarray  # (Q, 3 * patch_size^2) uint8


def _encoded(samples: Sequence[TokenizedSample], grids: np.ndarray, share: ImageShare, geometry: Geometry) -> _Encoded:
    """Return the images that a rank encodes, or a blank image if it encodes none."""
    if not share.images:
        merge = geometry.spatial_merge_size
        # Fused attention takes no empty input, and no collective may wait for a rank without images.
        blank = np.zeros((merge**2, geometry.patch_bytes), np.uint8)
        return _Encoded(np.array([[1, merge, merge]], np.int32), np.zeros(1, bool), blank, blank[:0])
    is_video = np.concatenate([s.is_video for s in samples])
    if len(share.images) == len(grids):
        arrays = ([s.patches for s in samples], [s.later_patches for s in samples])
        return _Encoded(grids, is_video, *map(np.concatenate, arrays))
    chosen, images = [*share.images], [*chain.from_iterable(s.visuals() for s in samples)]
    arrays = ([images[n].patches for n in chosen], [images[n].later_patches for n in chosen])
    return _Encoded(grids[chosen], is_video[chosen], *map(np.concatenate, arrays))


def geometry_of(shape: ModelShape) -> Geometry:
    """Return the facts of a model's shape that its micro batches need."""
    vision, images = shape.vision, shape.images
    language = shape.language
    of_layers = {"in_chunks": language.in_chunks, "marks_padding": language.routes_tokens}
    of_layers["predicts_second"] = language.mtp is not None
    if vision is None or images is None:
        return Geometry(**of_layers)
    return Geometry(
        image_token_id=images.image_token_id,
        spatial_merge_size=vision.spatial_merge_size,
        patch_bytes=3 * vision.patch_size**2,
        video_token_id=images.video_token_id if vision.temporal_patch_size == GROUP_FRAMES else None,
        **of_layers,
    )


_ALIGNMENT = 64  # bytes


class _Place(NamedTuple):
    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class OneCopy:
    """Several tensors in one piece of memory, which a single copy brings to a device."""

    memory: torch.Tensor  # uint8 bytes of all tensors
    places: Mapping[str, _Place]  # where each tensor lies

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, pin: bool) -> "OneCopy":
        """Copy tensors into new memory, which is page-locked if `pin`."""
        places, start = {}, 0
        for name, tensor in tensors.items():
            places[name] = _Place(start, start + tensor.nbytes, tensor.dtype, tensor.shape)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT  # a view needs its dtype's alignment, kernels more
        copied = cls(torch.empty(start, dtype=torch.uint8, pin_memory=pin), places)
        for view, tensor in zip(copied.views().values(), tensors.values(), strict=True):
            view.copy_(tensor)
        return copied

    def views(self) -> dict[str, torch.Tensor]:
        return {
            name: self.memory[place.start : place.stop].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }

    def to(self, device: torch.device) -> "OneCopy":
        """Return the same tensors on a device, copied asynchronously if pinned."""
        return OneCopy(self.memory.to(device, non_blocking=True), self.places)


def patch_coordinates(frames: np.ndarray, merge: int) -> np.ndarray:
    """Return (P, 2) int32 row and column of each patch in its frame, block by block, one image token a block.

    Args:
        frames: (F, 2) numbers of rows and columns of each frame, in patches, multiples of `merge`.
        merge: spatial_merge_size; patches are stored in blocks of merge x merge, one row of blocks after the other.
    """
    blocks = frames // merge
    counts = blocks.prod(1)
    block = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # index of each block in its frame
    corners = np.stack(np.divmod(block, np.repeat(blocks[:, 1], counts)), 1).astype(np.int32) * merge
    inside = np.stack(np.divmod(np.arange(merge**2), merge), 1).astype(np.int32)
    return (corners[:, None] + inside).reshape(-1, 2)
