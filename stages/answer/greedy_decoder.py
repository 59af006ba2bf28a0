"""Batched greedy decoding of many prompts: finished rows leave the batch, and new prompts enter it.

A row is a prompt and the tokens generated after it. Rows of different lengths share one cache. Each row is padded on
the left, its padding is masked, and its positions are its own, so that a row does not depend on the other rows. In
bfloat16 it may depend on them by rounding, because the number of rows changes the order of summation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from dataset_builders.contracts.tokenized import PatchFormat
from dataset_builders.errors import InputError
from dataset_builders.videos.sampling import FramePlan

CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin
_SPARSE = 0.75  # share of running rows at or below which finished rows are removed


@dataclass(frozen=True, eq=False, slots=True)
class EncodedImages:
    """The encoded images of one conversation, for any prompt that shows the first few of them."""

    grids: np.ndarray  # (g, 3) int32, patches before merging
    patches: tuple[np.ndarray, ...]  # for each image, (t*h*w, 3 * patch_size^2) uint8 in HF order


@dataclass(frozen=True, eq=False, slots=True)
class EncodedVideos:
    """The encoded videos of one conversation, for any prompt that shows the first few of them."""

    plans: tuple[FramePlan, ...] = ()
    # for each temporal group of each video, the patches of its two frames, each (h*w, 3 * patch_size^2) uint8
    groups: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


NO_VIDEOS = EncodedVideos()


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """The tokens, images and videos before one answer."""

    input_ids: np.ndarray  # (n,) int32, up to the start of the answer
    images: EncodedImages  # in order of appearance
    videos: EncodedVideos = NO_VIDEOS


@dataclass(slots=True)
class Row:
    """One answer while it is generated."""

    number: int  # the caller's number of the question
    limit: int  # tokens at most, including the end-of-turn token
    ids: list[int] = field(default_factory=list)  # the tokens so far, without the end-of-turn token
    stopped: bool = False  # whether an end-of-turn token was generated

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.ids) >= self.limit


@dataclass(frozen=True, eq=False, slots=True)
class PaddedPrompts:
    """Prompts that the model reads in one call, padded on the left to the longest; the tensors are on the CPU."""

    rows: list[Row]  # one per prompt
    ids: torch.Tensor  # (B, S) int64
    attended: torch.Tensor  # (B, S) int64, 0 at the padding
    positions: torch.Tensor  # (3, B, S) int64 of mrope, or (B, S) if positions have one axis; 1 at the padding
    next_positions: torch.Tensor  # (B,) int64, of the first generated token on all axes
    patches: torch.Tensor | None  # (P, 3 * patch_size^2) uint8 of all images; None if there are none
    # (2, P, 3 * patch_size^2) uint8, first and second frames of all temporal groups of videos; None if there are none
    frames: torch.Tensor | None
    grids: torch.Tensor | None  # (g, 3) int64 of all images; None if there are none
    video_grids: torch.Tensor | None  # the same of all temporal groups: a row (1, h, w) each

    @property
    def width(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of one decoding batch."""

    rows: int
    tokens: int  # of prompts and answers, including padding, when a prompt is added; a single prompt may be longer


class GreedyDecoder:
    """Greedy answers of a loaded transformers model, which is in evaluation mode and on its device."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        end_ids: Iterable[int],
        image_token_id: int,
        patch_format: PatchFormat,
        video_token_id: int = -1,
    ) -> None:
        self.model = model
        self.end_ids = frozenset(end_ids)
        self._image_token_id, self._video_token_id = image_token_id, video_token_id
        self._patch_format = patch_format
        self._has_axes = hasattr(model.model, "get_rope_index")  # transformers: its positions have three axes

    def pad(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> PaddedPrompts:
        """Pad prompts into one batch, in pinned memory for a GPU. Any thread may call this while `decode` runs."""
        lengths = [len(prompt.input_ids) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, -lengths[row] :] = torch.from_numpy(prompt.input_ids.astype(np.int64))
            attended[row, -lengths[row] :] = 1
        images = [prompt.images for prompt in prompts if len(prompt.images.grids)]
        grids = torch.from_numpy(np.concatenate([i.grids for i in images]).astype(np.int64)) if images else None
        patches = np.concatenate([p for i in images for p in i.patches]) if images else None
        groups = [group for prompt in prompts for group in prompt.videos.groups]
        plans = [plan for prompt in prompts for plan in prompt.videos.plans]
        frames = np.stack([np.concatenate(side) for side in zip(*groups)]) if groups else None
        # A row for each group is what transformers makes of a row for each video.
        video_grids = torch.from_numpy(np.concatenate([p.grids for p in plans]).astype(np.int64)) if plans else None
        positions = (attended.cumsum(-1) - 1).masked_fill(attended == 0, 1)
        following = torch.tensor(lengths)
        if self._has_axes:
            types = (ids == self._image_token_id).int() + 2 * (ids == self._video_token_id).int()
            positions, deltas = self.model.model.get_rope_index(
                ids,
                mm_token_type_ids=types,
                image_grid_thw=grids,
                video_grid_thw=video_grids,
                attention_mask=attended,
            )
            following = following + deltas[:, 0]
        arrays = [None if array is None else torch.from_numpy(array) for array in (patches, frames)]
        tensors = [ids, attended, positions, following, *arrays]
        if self.model.device.type == "cuda":
            tensors = [None if tensor is None else tensor.pin_memory() for tensor in tensors]
        return PaddedPrompts(list(rows), *tensors, grids, video_grids)

    def decode(self, groups: Iterable[PaddedPrompts], limits: PoolLimits) -> Iterator[Row]:
        """Yield every row of every group as soon as it has ended."""
        coming = iter(groups)
        waiting, pool = next(coming, None), _Pool(self)
        while waiting is not None or pool.rows:
            # Groups enter by lengths only, never by time, so that a rerun forms the same batches.
            while waiting is not None and pool.has_room(waiting, limits):
                yield from pool.take_out()
                pool.admit(waiting)
                waiting = next(coming, None)
            if sum(not row.ended for row in pool.rows) <= _SPARSE * len(pool.rows):
                yield from pool.take_out()
            elif pool.rows:
                pool.step()

    @torch.inference_mode()
    def read(self, prompts: PaddedPrompts, cache: transformers.DynamicCache) -> torch.Tensor:
        """Read the prompts into the cache, which must be empty; return (B,) int64, the first token of each answer."""
        inputs = {"input_ids": prompts.ids, "attention_mask": prompts.attended, "position_ids": prompts.positions}
        images = {}
        if prompts.patches is not None:
            images["pixel_values"] = self.pixel_values(self.to_device(prompts.patches))
            images["image_grid_thw"] = self.to_device(prompts.grids)
        if prompts.frames is not None:
            images["pixel_values_videos"] = self.pixel_values(*self.to_device(prompts.frames))
            images["video_grid_thw"] = self.to_device(prompts.video_grids)
        inputs = {name: self.to_device(value) for name, value in inputs.items()} | images
        logits = self._forward(inputs, cache)
        if not logits.isfinite().all():
            raise InputError(f"{self.model.name_or_path}: the model's output is not finite; export or copy it again")
        return logits.argmax(-1)

    @torch.inference_mode()
    def go_on(
        self,
        tokens: torch.Tensor,
        attended: torch.Tensor,
        positions: torch.Tensor,
        cache: transformers.DynamicCache,
    ) -> torch.Tensor:
        """Return (B,) int64, the next token of each row.

        Args:
            tokens: (B,) int64, the newest token of each row, not in the cache yet.
            attended: (B, L + 1) int64 for a cache of L columns.
            positions: (B,) int64 of the tokens.
        """
        places = positions[None, :, None].expand(3, -1, 1) if self._has_axes else positions[:, None]
        inputs = {"input_ids": tokens[:, None], "attention_mask": attended, "position_ids": places}
        return self._forward(inputs, cache).argmax(-1)

    def pixel_values(self, patches: torch.Tensor, later_patches: torch.Tensor | None = None) -> torch.Tensor:
        """Return (P, C) float32 on the patches' device, with the bits of `dataset_builders.pictures.pixels`. Both are
        (P, 3 * patch_size^2) uint8, of the first and second frames of groups; an image is the same frame twice."""
        size, frames = self._patch_format.patch_size**2, self._patch_format.temporal_patch_size
        mean, std = (
            torch.tensor(channels, dtype=torch.float32).mul_(255).repeat_interleave(size).to(patches.device)
            for channels in (self._patch_format.image_mean, self._patch_format.image_std)
        )
        both = patches[:, None] if later_patches is None else torch.stack([patches, later_patches], 1)
        scaled = both.float().sub_(mean).div_(std).reshape(len(patches), -1, 3, size)
        return scaled.transpose(1, 2).expand(-1, 3, frames, size).reshape(len(patches), -1)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.model.device, non_blocking=True)

    def _forward(self, inputs: dict[str, torch.Tensor], cache: transformers.DynamicCache) -> torch.Tensor:
        out = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]


class _Pool:
    """The rows of the current batch, and their cache."""

    def __init__(self, decoder: GreedyDecoder) -> None:
        self.rows: list[Row] = []  # in the cache's order; some may have ended
        self._decoder = decoder
        self._cache: transformers.DynamicCache | None = None
        self._tokens = self._positions = torch.empty(0)  # (B,): newest token of each row, and its position
        self._attended = torch.empty(0)  # (B, L) int64: attention mask of the cache's columns

    def has_room(self, coming: PaddedPrompts, limits: PoolLimits) -> bool:
        """Whether these prompts fit after the ended rows are removed."""
        working = [row for row in self.rows if not row.ended]
        if not working:
            return True
        together = len(working) + len(coming.rows)
        width = max(self._attended.shape[1], coming.width)
        return together <= limits.rows and together * width <= limits.tokens

    def admit(self, coming: PaddedPrompts) -> None:
        """Read new prompts and append them to the current rows."""
        cache = transformers.DynamicCache(config=self._decoder.model.config.get_text_config())
        tokens = self._decoder.read(coming, cache)
        positions, attended = self._decoder.to_device(coming.next_positions), self._decoder.to_device(coming.attended)
        if self.rows:
            width = max(self._attended.shape[1], coming.width)
            for ours, theirs in zip(self._cache.layers, cache.layers):
                _add_rows(ours, theirs, width)  # by layer, so that two further whole caches never exist at once
            self._attended = torch.cat([_widened(self._attended, width, 1), _widened(attended, width, 1)])
            self._tokens, self._positions = torch.cat([self._tokens, tokens]), torch.cat([self._positions, positions])
        else:
            self._cache, self._attended, self._tokens, self._positions = cache, attended, tokens, positions
        self.rows += coming.rows
        self._note(coming.rows, tokens)

    def step(self) -> None:
        """Generate one more token for every row."""
        self._attended = torch.nn.functional.pad(self._attended, (0, 1), value=1)
        self._tokens = self._decoder.go_on(self._tokens, self._attended, self._positions, self._cache)
        self._positions = self._positions + 1
        self._note(self.rows, self._tokens)

    def take_out(self) -> list[Row]:
        """Remove the ended rows, and the columns that only they used, from the pool; return these rows."""
        ended = [row for row in self.rows if row.ended]
        if not ended:
            return []
        running = [place for place, row in enumerate(self.rows) if not row.ended]
        self.rows = [self.rows[place] for place in running]
        if not running:
            self._cache = None
            return ended
        places = torch.tensor(running, device=self._tokens.device)
        self._tokens, self._positions = self._tokens[places], self._positions[places]
        attended = self._attended[places]
        first = int(attended.any(0).int().argmax())  # the columns before it are the padding of all rows
        self._attended = attended[:, first:]
        for layer in self._cache.layers:
            _keep_rows(layer, places, first)
        return ended

    def _note(self, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        for row, token in zip(rows, tokens.tolist()):
            if row.ended:
                continue
            if token in self._decoder.end_ids:
                row.stopped = True
            else:
                row.ids.append(token)


def _add_rows(ours: CacheLayer, theirs: CacheLayer, width: int) -> None:
    """Move the rows of another cache's layer to the end of our layer's rows."""
    if isinstance(ours, LinearAttentionCacheLayerMixin):
        # A gated delta net keeps a state and the last inputs of its convolution, and no columns of tokens.
        for of_ours, of_theirs in zip(_states(ours), _states(theirs)):
            for index, state in of_ours.items():
                of_ours[index] = torch.cat([state, of_theirs.pop(index)])
        return
    ours.keys = torch.cat([_widened(ours.keys, width, 2), _widened(theirs.keys, width, 2)])
    ours.values = torch.cat([_widened(ours.values, width, 2), _widened(theirs.values, width, 2)])
    theirs.keys = theirs.values = None


def _keep_rows(layer: CacheLayer, rows: torch.Tensor, first: int) -> None:
    """Keep only these rows, and the columns from the first one that any of them uses."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for states in _states(layer):
            for index, state in states.items():
                states[index] = state[rows]
        return
    layer.keys, layer.values = layer.keys[rows, :, first:], layer.values[rows, :, first:]


def _states(layer: LinearAttentionCacheLayerMixin) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    return layer.conv_states, layer.recurrent_states


def _widened(tensor: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Return the tensor, padded with zeros at the front of a dimension up to this width."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim)
