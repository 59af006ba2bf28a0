"""Where a packed bin's segments lie, cut into chunks for the delta rule: made on the host where the bin is laid."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNK = 64  # tokens: the rule is a matrix product inside a chunk, a recurrence from chunk to chunk


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """T tokens in segments, each cut into chunks of 64 from its own start: only a segment's last chunk is shorter.

    Everything that sets a grid or a loop is a Python number, so nothing waits for the device. The tensors are int32.
    """

    bounds: tuple[int, ...]  # of the segments: segment i has tokens bounds[i] to bounds[i + 1]
    starts: torch.Tensor  # (N,) the first token of each chunk
    rows: torch.Tensor  # (N,) its tokens, 1 to 64
    spans: torch.Tensor  # (segments, 4) first chunk and the one past the last, and the same of tokens; longest first
    positions: torch.Tensor  # (T,) of each token in its segment

    @classmethod
    def of(cls, bounds: Sequence[int], device: torch.device | str = "cpu") -> "PackedChunks":
        """From cumulated lengths [0, ..., T]. Segments without tokens are left out. One copy to the device."""
        bounds = tuple(int(bound) for bound in bounds)
        if bounds[0] != 0 or any(b < a for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"bounds must rise from 0, as cumulated lengths do; they are {bounds[:8]}...")
        bounds = (0, *(b for a, b in itertools.pairwise(bounds) if b > a))
        starts, rows, spans = [], [], []
        for begin, end in itertools.pairwise(bounds):
            first = list(range(begin, end, CHUNK))
            spans.append((len(starts), len(starts) + len(first), begin, end))
            starts += first
            rows += [min(CHUNK, end - start) for start in first]
        spans.sort(key=lambda span: span[0] - span[1])
        positions = torch.cat([torch.arange(b - a, dtype=torch.int32) for a, b in itertools.pairwise(bounds)])
        flat = torch.tensor([*starts, *rows, *(x for span in spans for x in span)], dtype=torch.int32)
        flat = torch.cat([flat, positions])
        if torch.device(device).type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        n, s = len(starts), len(spans)
        parts = flat.split([n, n, 4 * s, len(positions)])
        return cls(bounds, parts[0], parts[1], parts[2].view(s, 4), parts[3])

    @property
    def chunks(self) -> int:
        return len(self.starts)

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    def lengths(self) -> list[int]:
        """Tokens of each segment, in the bin's order."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:])]
