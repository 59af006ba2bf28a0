"""What a builder offers: parts of a source that can be read side by side, and the samples of a part."""

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dataset_builders.contracts.sample import Sample, Split
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.strict import StrictModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A run of neighbouring rows of one file: what one worker reads at a time.

    Attributes:
        path: the file.
        name: the file as a person knows it, below the source: `ai2d/train-00000-of-00002.parquet`.
        subset: the subset its rows belong to.
        span: where the run begins and ends in the file, as its builder counts: row groups of a parquet file, bytes of
            a JSONL or tar file. A part may be only some of the rows there.
        first_row: number of its first row in the subset, over all of the subset's files.
        file_row: number of its first row in the file.
        num_rows: rows in it.
        split: the split that the source itself puts these rows in; None leaves it to convert.
    """

    path: StorePath
    name: str
    subset: str
    span: tuple[int, int]
    first_row: int
    file_row: int
    num_rows: int
    split: Split | None = None

    def key(self, row: int) -> str:
        """The key of row `row` of the subset: the same however the subset is cut into files."""
        return f"{self.subset}/{row:08d}"

    def row(self, key: str) -> int:
        """The inverse of `key`, also of the key of one pair of the row."""
        return int(key.rpartition("/")[2].partition("-")[0])

    def row_in_file(self, key: str) -> int:
        """Where the row of one of this part's keys lies in the file, counted from 0."""
        return self.row(key) - self.first_row + self.file_row


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row, or a pair of a row, that is no usable sample.

    Attributes:
        key: the key the sample would have had.
        reason: one of SKIP_REASONS.
        detail: what was found.
    """

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Builder:
    """One dataset's way from files to samples.

    Attributes:
        options: the model of the builder's own settings, `convert.options` of a recipe.
        patterns: (subsets; none means all) -> globs below the source of every file that is read: what a hub download
            fetches, and what identifies the raw data.
        list_parts: (source directory, subsets, options) -> parts, in an order that decides the samples'. Raises
            InputError for a file that cannot be read or lacks a column.
        iter_part: (part, options, rows) -> its samples in order. `rows` limits it to those rows of the subset, by
            number; None means all. Raises InputError where the file breaks off.
        has_splits: whether its parts may say which split they belong to.
    """

    options: type[StrictModel]
    patterns: Callable[[Sequence[str]], tuple[str, ...]]
    list_parts: Callable[[StorePath, Sequence[str], Any], list[Part]]
    iter_part: Callable[[Part, Any, Container[int] | None], Iterator[Sample | SkippedRow]]
    has_splits: bool = False


def natural_order(text: str) -> list[tuple[int, int | str]]:
    """Sort key that puts shard-2 before shard-10."""
    pieces = re.split(r"(\d+)", text)
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces]
