"""The runs of a tokenized sample: given text, trained text, images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dataset_builders.contracts.tokenized import TokenizedSample


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of one kind from `start` to before `end`; an image has a number, from 1, and its size in tokens."""

    kind: Literal["given", "learnt", "image"]
    start: int
    end: int
    number: int = 0
    rows: int = 0
    columns: int = 0


def token_runs(sample: TokenizedSample, image_token_id: int, merge_size: int) -> Iterator[TokenRun]:
    """Yield all tokens of a sample as consecutive runs."""
    kinds = np.where(sample.input_ids == image_token_id, 2, sample.loss_mask)
    starts = np.flatnonzero(np.diff(kinds, prepend=-1)).tolist()
    images = enumerate((sample.image_grid_thw // [1, merge_size, merge_size]).tolist(), 1)
    for start, end in zip(starts, [*starts[1:], len(kinds)]):
        if kinds[start] == 2:
            number, (_, rows, columns) = next(images)
            yield TokenRun("image", start, end, number, rows, columns)
        else:
            yield TokenRun("learnt" if kinds[start] else "given", start, end)
