"""The bounds of a packed bin's segments and of their chunks for the delta rule, computed by the data worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.slices import joined_ranges
from trainer.model.shape import DELTA_CHUNK as CHUNK


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The chunks of T tokens in segments: each segment is cut into chunks of 64 tokens, and its last may be shorter.

    All sizes of grids and loops are Python integers, so nothing waits for the device. The tensors are int32 views of
    `table`, which is copied at once.
    """

    bounds: tuple[int, ...]  # bounds of the segments: segment i has tokens bounds[i] to bounds[i + 1]
    table: torch.Tensor  # (2 N + 4 segments + T,) all other tensors, concatenated
    starts: torch.Tensor  # (N,) the first token of each chunk
    rows: torch.Tensor  # (N,) number of tokens of each chunk, 1 to 64
    spans: torch.Tensor  # (segments, 4) first and end chunk, first and end token; longest segment first
    positions: torch.Tensor  # (T,) position of each token in its segment

    @classmethod
    def of(cls, bounds: Sequence[int]) -> "PackedChunks":
        """Build from cumulative lengths [0, ..., T]; segments without tokens are left out."""
        lengths = np.diff(bounds)
        if bounds[0] != 0 or (lengths < 0).any():
            raise ValueError(f"bounds must rise from 0, as cumulated lengths do; they are {bounds[:8]}...")
        lengths = lengths[lengths > 0]
        counts = -(-lengths // CHUNK)
        ends, lasts = lengths.cumsum(), counts.cumsum()
        begins, firsts = ends - lengths, lasts - counts
        starts = np.repeat(begins, counts) + CHUNK * joined_ranges(np.zeros_like(counts), counts)
        rows = np.minimum(np.repeat(ends, counts) - starts, CHUNK)
        longest_first = np.argsort(-counts, kind="stable")
        spans = np.stack([firsts, lasts, begins, ends], 1)[longest_first].ravel()
        positions = joined_ranges(np.zeros_like(lengths), lengths)
        table = np.concatenate([starts, rows, spans, positions]).astype(np.int32)
        return cls._with(torch.from_numpy(table), (0, *ends.tolist()), len(starts))

    @classmethod
    def _with(cls, table: torch.Tensor, bounds: tuple[int, ...], chunks: int) -> "PackedChunks":
        segments = len(bounds) - 1
        starts, rows, spans, positions = table.split([chunks, chunks, 4 * segments, bounds[-1]])
        return cls(bounds, table, starts, rows, spans.view(segments, 4), positions)

    @property
    def chunks(self) -> int:
        return len(self.starts)

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    def lengths(self) -> list[int]:
        """Return the number of tokens of each segment, in the bin's order."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:])]

    def to(self, device: torch.device | str) -> "PackedChunks":
        """Return the same chunks on `device`, with a single copy."""
        return self.with_table(self.table.to(device))

    def with_table(self, table: torch.Tensor) -> "PackedChunks":
        """Return the same chunks in a copy of the table."""
        return self._with(table, self.bounds, self.chunks)
