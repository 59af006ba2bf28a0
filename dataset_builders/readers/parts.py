"""The interface of a builder: it cuts a source into parts, for parallel reading, and yields a part's samples.

Also, which files and folders are named like held-out data, so that nobody trains on them unawares.
"""

import dataclasses
import glob
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dataset_builders.contracts.sample import Sample, SkipSample, Split
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError, shown
from dataset_builders.storage.row_objects import stores_of_rows
from dataset_builders.storage.store import StorePath

TRAIN = ("train", "training", "trainset")
HELDOUT = (
    *("validation", "valid", "val", "valset", "test", "testing", "testset", "testa", "testb", "dev", "devset", "eval"),
    *("evaluation", "holdout", "heldout", "held", "minival", "minitest", "submission"),
)
SPLIT_NAMES = ("split", "subset", "partition", "part", "set")  # of columns

# Words of folders that are named neither after a class nor after what their images show.
NO_CLASSES = frozenset(
    {*TRAIN, *HELDOUT, "images", "image", "imgs", "img", "pictures", "photos", "data", "set", "out", "seen", "unseen"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A run of neighbouring rows of one file, which one worker reads at a time."""

    path: StorePath
    name: str  # the file's name for people, relative to the source: ai2d/train-00000-of-00002.parquet
    subset: str
    # Start and end in the file, in the builder's units: row groups of a parquet file, bytes of a CSV, JSONL or tar.
    # A part may hold only some of the rows in its span.
    span: tuple[int, int]
    first_row: int  # number of its first row in the subset, over all of the subset's files
    file_row: int  # number of its first row in the file
    num_rows: int
    split: Split | None = None  # the split that the source itself gives these rows; None leaves the choice to convert
    skip: int = 0  # number of rows at the start of the span that belong to earlier parts
    # The names of the rows' files, relative to the source, if each row is a file of its own. `path` and `name` are then
    # the first file's.
    files: tuple[str, ...] = ()
    # The stores whose objects its rows may name; None: any. The part carries them, because a worker on another host has
    # another environment.
    stores: tuple[str, ...] | None = None
    # The beginning of `subset` that is not its own: the source's name and an underscore, of one of several sources.
    prefix: str = ""

    @property
    def own_subset(self) -> str:
        """The subset's name in its source, by which a known dataset knows it."""
        return self.subset.removeprefix(self.prefix)

    def key(self, row: int) -> str:
        """Return the key of row number `row` of the subset. It does not depend on how the subset is cut into files."""
        return f"{self.subset}/{row:08d}"

    def row(self, key: str) -> int:
        """Return the row number of a key. Inverse of `key`; the key may also belong to one pair of the row."""
        return int(key.rpartition("/")[2].partition("-")[0])

    def row_in_file(self, key: str) -> int:
        """Return the number in the file, from 0, of the row of one of this part's keys."""
        return self.row(key) - self.first_row + self.file_row

    def place(self, key: str) -> tuple[str, int]:
        """Return (name of the file, row number in it) for one of this part's keys."""
        if self.files:
            return self.files[self.row(key) - self.first_row], 0
        return self.name, self.row_in_file(key)


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row, or a pair of a row, that cannot be used as a sample."""

    key: str  # the key that the sample would have had
    reason: str  # one of SKIP_REASONS
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Builder:
    """The functions and settings that convert one kind of dataset to samples."""

    options: type[StrictModel]  # the model of the builder's own settings, `convert.options` of a recipe
    # Subsets (none means all) -> globs, relative to the source, of all files that are read. A hub download fetches
    # these files, and they identify the raw data.
    patterns: Callable[[Sequence[str]], tuple[str, ...]]
    # (source directory, subsets, options) -> parts; their order is that of the samples. Raises InputError for a file
    # that cannot be read or lacks a column.
    list_parts: Callable[[StorePath, Sequence[str], Any], list[Part]]
    # (part, options, rows) -> the part's samples in order. `rows` limits them to these row numbers of the subset; None
    # means all. Raises InputError if the file is cut short.
    iter_part: Callable[[Part, Any, Container[int] | None], Iterator[Sample | SkippedRow]]
    has_splits: bool = False  # whether its parts may set `split`
    # (part, options) -> what is left out within the part's rows, which stay, in words -> how often; None: nothing is.
    not_read: Callable[[Part, Any], Mapping[str, int]] | None = None
    images_are_rows: bool = False  # whether an image is a row by itself, so that a source may hold only images


def parts_of(
    builder: Builder, source: StorePath, subsets: Sequence[str], options: Any, heldout_files: Sequence[str] | None = ()
) -> list[Part]:
    """Return the parts of a source, in order.

    Args:
        heldout_files: globs of the names of files, relative to the source, whose rows are held out; all other rows are
            then train. Empty: the builder decides. None: the same, if no file is named like a held-out split.
    """
    stores = stores_of_rows(source)
    parts = [dataclasses.replace(part, stores=stores) for part in builder.list_parts(source, subsets, options)]
    builder_decides = any(part.split is not None or part.files for part in parts)
    if heldout_files is None:
        globs = () if builder_decides else heldout_globs([part.name for part in parts])
        if globs:
            name = next(part.name for part in parts if fnmatchcase(part.name, globs[0]))
            raise InputError(
                f"{shown(name)} in {source} is named like held-out data, and its rows would be trained on; beside "
                f"builder, set heldout_files: {json.dumps(globs)} to hold them out, or heldout_files: [] to treat all "
                "files alike"
            )
        return parts
    for pattern in heldout_files:
        if not any(fnmatchcase(part.name, pattern) for part in parts):
            raise InputError(
                f"heldout_files: no file of rows in {source} is named {pattern!r}; give a glob like data/test-*"
            )
    if not heldout_files:
        return parts
    if builder_decides:
        raise InputError(
            f"heldout_files={list(heldout_files)}: the builder's options say which rows of {source} are held out; set "
            "options.heldout_splits, and leave out heldout_files"
        )
    held = [any(fnmatchcase(part.name, pattern) for pattern in heldout_files) for part in parts]
    return [dataclasses.replace(part, split="heldout" if is_held else "train") for part, is_held in zip(parts, held)]


def convert_rows(
    part: Part, rows: Iterable[tuple[int, Any]], convert: Callable[[str, Any], Iterable[Sample | SkippedRow]]
) -> Iterator[Sample | SkippedRow]:
    """Yield what `convert` makes of each row of a part, from its key and its record.

    Args:
        rows: (row number in the subset, the record, or the SkipSample that says why there is none).
    """
    for row, record in rows:
        try:
            if isinstance(record, SkipSample):
                raise record
            yield from convert(part.key(row), record)
        except SkipSample as skip:
            yield SkippedRow(part.key(row), skip.reason, skip.detail)


def natural_order(text: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts shard-2 before shard-10."""
    pieces = re.split(r"(\d+)", text)
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces]


def words_of(name: str) -> set[str]:
    """Return the words of a name in lower case, without single letters: testA and test_b have one word, test."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
    return {word.lower() for word in words if len(word) > 1}


def split_of(name: str) -> str | None:
    """Return `train` or `heldout` for a name of a split, such as train, Test or test_images2017; None for others."""
    words = words_of(name)
    if not words <= NO_CLASSES or words.isdisjoint({*TRAIN, *HELDOUT}):
        return None
    return "heldout" if words.isdisjoint(TRAIN) else "train"


def splits_of(names: Iterable[str]) -> dict[str, str]:
    """Return the folders among these names that are splits -> `train` or `heldout`.

    Where one is named after training and another after held-out data, other words beside do not matter: seg_train and
    seg_test. Else only names like train, Test or test_images2017 are splits.
    """
    names = list(dict.fromkeys(names))
    held = {name for name in names if is_held(name)}
    train = {name for name in names if not words_of(name).isdisjoint(TRAIN)}
    if held and train:
        return {name: "heldout" if name in held else "train" for name in names if name in held | train}
    return {name: split for name in names if (split := split_of(name)) is not None}


def heldout_globs(names: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the files that are named like a held-out split; none if all files are, or none is.

    A running number is `*` in a glob: data/test-*-of-*.parquet.
    """
    held = {name: is_held(name.rpartition(".")[0]) for name in names}
    if len(set(held.values())) < 2:
        return ()
    escaped = {glob.escape(name): re.sub(r"\d+", "*", glob.escape(name)) for name in names if held[name]}
    # With `*` for its numbers, a name may also match a file that is not held out: then the names themselves are given.
    is_wide = any(fnmatchcase(name, pattern) for name in names if not held[name] for pattern in escaped.values())
    return tuple(dict.fromkeys(escaped if is_wide else escaped.values()))


def is_held(name: str) -> bool:
    """Whether a name has a word of held-out data and none of training data."""
    words = words_of(name)
    return not words.isdisjoint(HELDOUT) and words.isdisjoint(TRAIN)
