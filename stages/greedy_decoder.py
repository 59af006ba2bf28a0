"""Greedy decoding of many prompts side by side: rows that have ended leave, new prompts take their places.

A row is a prompt and what was generated after it. Rows of different lengths share one key-value cache: each is padded
on the left, its padding is masked, and its positions are its own, so that what a row says does not depend on the rows
beside it. (In bfloat16 it may, by rounding: another number of rows is another order of summation.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers

from dataset_builders.contracts.tokenized import PatchFormat

_SPARSE = 0.75  # rows still at work, as a part of all, from which on the others are worth taking out


@dataclass(frozen=True, eq=False, slots=True)
class EncodedImages:
    """Images of one conversation, ready for any prompt that shows the first few of them.

    Attributes:
        grids: (g, 3) int32, patches before merging.
        patches: for each image (t*h*w, 3 * patch_size^2) uint8 in HF order.
    """

    grids: np.ndarray
    patches: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """What one answer is generated from.

    Attributes:
        input_ids: (n,) int32, ends where the answer begins.
        images: those of the prompt, in order of appearance.
    """

    input_ids: np.ndarray
    images: EncodedImages


@dataclass(slots=True)
class Row:
    """One answer in the making.

    Attributes:
        number: of the question, the caller's own.
        limit: tokens at most, an end-of-turn token among them.
        ids: generated so far, without the end-of-turn token.
        stopped: an end-of-turn token came.
    """

    number: int
    limit: int
    ids: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.ids) >= self.limit


@dataclass(frozen=True, eq=False, slots=True)
class PaddedPrompts:
    """Prompts that are read by the model in one call, padded on the left to the longest; tensors of the CPU.

    Attributes:
        rows: one a prompt.
        ids: (B, S) int64.
        attended: (B, S) int64, 0 at the padding.
        positions: (3, B, S) int64, mrope's; 1 at the padding.
        next_positions: (B,) int64, of the first generated token on all three axes.
        patches: (P, 3 * patch_size^2) uint8 of all images, and None without any.
        grids: (g, 3) int64 of all images, and None without any.
    """

    rows: list[Row]
    ids: torch.Tensor
    attended: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    patches: torch.Tensor | None
    grids: torch.Tensor | None

    @property
    def width(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How much is decoded side by side.

    Attributes:
        rows: answers, at most.
        tokens: of prompts and answers with their padding, at most, when a new prompt comes in (one may be longer).
    """

    rows: int
    tokens: int


class GreedyDecoder:
    """A loaded model of transformers that answers prompts.

    Args:
        model: in evaluation mode, on its device.
        end_ids: tokens that end an answer.
        image_token_id: marks the places of an image's tokens in a prompt.
        patch_format: how bytes of patches become pixel values.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        end_ids: Sequence[int],
        image_token_id: int,
        patch_format: PatchFormat,
    ) -> None:
        self.model = model
        self.end_ids = frozenset(end_ids)
        self._image_token_id = image_token_id
        self._patch_format = patch_format

    def pad(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> PaddedPrompts:
        """Prompts side by side, in memory from which a GPU copies fast. May run in any thread, beside `decode`."""
        lengths = [len(prompt.input_ids) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, -lengths[row] :] = torch.from_numpy(prompt.input_ids.astype(np.int64))
            attended[row, -lengths[row] :] = 1
        images = [prompt.images for prompt in prompts if len(prompt.images.grids)]
        grids = torch.from_numpy(np.concatenate([i.grids for i in images]).astype(np.int64)) if images else None
        patches = np.concatenate([p for i in images for p in i.patches]) if images else None
        types = (ids == self._image_token_id).int()
        positions, deltas = self.model.model.get_rope_index(
            ids, mm_token_type_ids=types, image_grid_thw=grids, attention_mask=attended
        )
        following = torch.tensor(lengths) + deltas[:, 0]
        patches = None if patches is None else torch.from_numpy(patches)
        padded = PaddedPrompts(list(rows), *map(self._pinned, (ids, attended, positions, following, patches)), grids)
        return padded

    def decode(self, groups: Iterable[PaddedPrompts], limits: PoolLimits) -> Iterator[Row]:
        """Every row of every group, as they end. When groups come in depends on lengths alone, never on time."""
        coming = iter(groups)
        waiting, pool = next(coming, None), _Pool(self)
        while waiting is not None or pool.rows:
            while waiting is not None and pool.has_room(waiting, limits):
                yield from pool.take_out()
                pool.admit(waiting)
                waiting = next(coming, None)
            if pool.num_working <= _SPARSE * len(pool.rows):
                yield from pool.take_out()
            elif pool.rows:
                pool.step()

    @torch.inference_mode()
    def read(self, prompts: PaddedPrompts, cache: transformers.DynamicCache) -> torch.Tensor:
        """Fill an empty cache with the prompts: (B,) int64, the first token of each answer."""
        inputs = {"input_ids": prompts.ids, "attention_mask": prompts.attended, "position_ids": prompts.positions}
        images = {}
        if prompts.patches is not None:
            images["pixel_values"] = self.pixel_values(self.to_device(prompts.patches))
            images["image_grid_thw"] = self.to_device(prompts.grids)
        return self._forward({name: self.to_device(value) for name, value in inputs.items()} | images, cache)

    @torch.inference_mode()
    def go_on(
        self, tokens: torch.Tensor, attended: torch.Tensor, positions: torch.Tensor, cache: transformers.DynamicCache
    ) -> torch.Tensor:
        """One token further.

        Args:
            tokens: (B,) int64, the newest of each row, not in the cache yet.
            attended: (B, L + 1) int64 for a cache of L columns.
            positions: (B,) int64 of the tokens.

        Returns:
            (B,) int64, the next ones.
        """
        places = positions[None, :, None].expand(3, -1, 1)
        inputs = {"input_ids": tokens[:, None], "attention_mask": attended, "position_ids": places}
        return self._forward(inputs, cache)

    def pixel_values(self, patches: torch.Tensor) -> torch.Tensor:
        """`dataset_builders.pixels.pixel_values` where the patches are, to the same bits: (P, C) float32."""
        size, frames = self._patch_format.patch_size**2, self._patch_format.temporal_patch_size
        mean, std = (
            torch.tensor(channels, dtype=torch.float32).mul_(255).repeat_interleave(size).to(patches.device)
            for channels in (self._patch_format.image_mean, self._patch_format.image_std)
        )
        scaled = patches.float().sub_(mean).div_(std).reshape(-1, 3, 1, size)
        return scaled.expand(-1, 3, frames, size).reshape(len(patches), -1)

    def new_cache(self) -> transformers.DynamicCache:
        return transformers.DynamicCache(config=self.model.config.get_text_config())

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.model.device, non_blocking=True)

    def _forward(self, inputs: dict[str, torch.Tensor], cache: transformers.DynamicCache) -> torch.Tensor:
        out = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)

    def _pinned(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.pin_memory() if tensor is not None and self.model.device.type == "cuda" else tensor


class _Pool:
    """The rows that are decoded now, and their cache.

    Attributes:
        rows: in the cache's order; some may have ended.
    """

    def __init__(self, decoder: GreedyDecoder) -> None:
        self.rows: list[Row] = []
        self._decoder = decoder
        self._cache: transformers.DynamicCache | None = None
        self._tokens = self._positions = torch.empty(0)  # (B,) the newest token of each row, and where it stands
        self._attended = torch.empty(0)  # (B, L) int64, of the cache's columns

    @property
    def num_working(self) -> int:
        return sum(not row.ended for row in self.rows)

    def has_room(self, coming: PaddedPrompts, limits: PoolLimits) -> bool:
        """Whether these fit once the rows that have ended are gone."""
        working = [row for row in self.rows if not row.ended]
        if not working:
            return True
        together = len(working) + len(coming.rows)
        width = max(self._attended.shape[1], coming.width)
        return together <= limits.rows and together * width <= limits.tokens

    def admit(self, coming: PaddedPrompts) -> None:
        """Read new prompts beside the rows that are here."""
        cache = self._decoder.new_cache()
        tokens = self._decoder.read(coming, cache)
        positions, attended = self._decoder.to_device(coming.next_positions), self._decoder.to_device(coming.attended)
        if self.rows:
            width = max(self._attended.shape[1], coming.width)
            for ours, theirs in zip(self._cache.layers, cache.layers):
                ours.keys = torch.cat([_widened(ours.keys, width, 2), _widened(theirs.keys, width, 2)])
                ours.values = torch.cat([_widened(ours.values, width, 2), _widened(theirs.values, width, 2)])
                theirs.keys = theirs.values = None  # layer by layer, so that there are never two whole caches more
            self._attended = torch.cat([_widened(self._attended, width, 1), _widened(attended, width, 1)])
            self._tokens, self._positions = torch.cat([self._tokens, tokens]), torch.cat([self._positions, positions])
        else:
            self._cache, self._attended, self._tokens, self._positions = cache, attended, tokens, positions
        self.rows += coming.rows
        self._note(coming.rows, tokens)

    def step(self) -> None:
        """One token more for every row."""
        self._attended = torch.nn.functional.pad(self._attended, (0, 1), value=1)
        self._tokens = self._decoder.go_on(self._tokens, self._attended, self._positions, self._cache)
        self._positions = self._positions + 1
        self._note(self.rows, self._tokens)

    def take_out(self) -> list[Row]:
        """Remove the rows that have ended, and the columns that were theirs alone."""
        ended = [row for row in self.rows if row.ended]
        if not ended:
            return []
        kept = [place for place, row in enumerate(self.rows) if not row.ended]
        self.rows = [self.rows[place] for place in kept]
        if not kept:
            self._cache = None
            return ended
        places = torch.tensor(kept, device=self._tokens.device)
        self._tokens, self._positions = self._tokens[places], self._positions[places]
        attended = self._attended[places]
        first = int(attended.any(0).int().argmax())
        self._attended = attended[:, first:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[places, :, first:], layer.values[places, :, first:]
        return ended

    def _note(self, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        for row, token in zip(rows, tokens.tolist()):
            if row.ended:
                continue
            if token in self._decoder.end_ids:
                row.stopped = True
            else:
                row.ids.append(token)


def _widened(tensor: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Zeros put in front of a dimension, up to this width."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim)
