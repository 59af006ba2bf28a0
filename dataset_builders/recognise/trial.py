"""A trial: a builder reads the first rows of a source, and the trial counts usable rows and the faults of the rest."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits, check_image
from dataset_builders.readers.parts import Part, SkippedRow, parts_of
from dataset_builders.recognise.reading import Reading
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath

MAX_ROWS = 200
_MAX_PARTS = 8  # most parts that are opened, for a source of many files
_MAX_FILES = 32  # most files for each of which a directory of images is searched
_ROOT_ROWS = 10  # number of rows on which each possible image_root is tried


@dataclass(slots=True)
class Trial:
    """The result of reading a source's first rows with a builder."""

    reading: Reading
    rows: int = 0  # in the whole source; 0 if the builder refuses it
    tried: int = 0  # number of rows that were read
    samples: list[Sample] = field(default_factory=list)  # of the usable rows
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (width, height) of each image of the samples
    reasons: Counter[str] = field(default_factory=Counter)  # skip reason -> number of rows
    details: dict[str, str] = field(default_factory=dict)  # skip reason -> the first such row's key and the fault
    duplicates: int = 0  # samples that equal an earlier one
    refused: str = ""  # why the builder refuses the source; empty if it reads it
    subsets: Counter[str] = field(default_factory=Counter)  # subset -> number of rows
    splits: bool = False  # whether the source specifies which rows are held out
    heldout: int = 0  # number of rows that the source itself holds out

    @property
    def usable(self) -> float:
        """The share of the tried rows that are samples."""
        return len(self.samples) / self.tried if self.tried else 0.0


def try_reading(source: StorePath, reading: Reading, limit: int = MAX_ROWS, limits: ImageLimits | None = None) -> Trial:
    """Read up to `limit` rows, from the beginnings of up to eight parts spread over the source. With `limits`, images
    are decoded and checked."""
    trial, builder = Trial(reading), get_builder(reading.builder)
    digests: set[str] = set()
    try:
        options = builder.options.model_validate(reading.options)
        parts = parts_of(builder, source, reading.subsets, options, reading.heldout_files)
        trial.rows = sum(part.num_rows for part in parts)
        trial.splits = any(part.split is not None for part in parts)
        trial.heldout = sum(part.num_rows for part in parts if part.split == "heldout")
        for part in parts:
            trial.subsets[part.subset] += part.num_rows
        for item in _rows(parts, reading, options, limit):
            trial.tried += 1
            if (skip := _check(item, trial, limits)) is not None:
                trial.reasons[skip[0]] += 1
                trial.details.setdefault(skip[0], f"{item.key}: {skip[1]}")
                continue
            trial.duplicates += item.digest() in digests
            digests.add(item.digest())
            trial.samples.append(item)
    except (InputError, ValueError) as error:  # ValueError: invalid options
        trial.refused = str(error)
    return trial


def try_image_roots(source: StorePath, reading: Reading, roots: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return file -> directory below the source -> share of the file's first rows whose images are found there.

    Of a source with many files, some files stand for all.
    """
    builder = get_builder(reading.builder)
    options = {root: builder.options.model_validate({**reading.options, "image_root": root}) for root in roots}
    parts = parts_of(builder, source, reading.subsets, options[roots[0]], reading.heldout_files)
    first = list({part.name: part for part in reversed(parts)}.values())
    shares: dict[str, dict[str, float]] = {}
    for part in first if len(first) <= _MAX_FILES else first[:: len(first) // _MAX_PARTS]:
        rows = range(part.first_row, part.first_row + min(_ROOT_ROWS, part.num_rows))
        for root in roots:
            items = list(itertools.islice(builder.iter_part(part, options[root], rows), 4 * _ROOT_ROWS))
            lost = sum(isinstance(item, SkippedRow) and item.reason == "image_not_found" for item in items)
            shares.setdefault(part.name, {})[root] = 1 - lost / max(1, len(items))
    return shares


def _rows(parts: list[Part], reading: Reading, options: object, limit: int) -> Iterator[Sample | SkippedRow]:
    chosen = parts if len(parts) <= _MAX_PARTS else [parts[i * len(parts) // _MAX_PARTS] for i in range(_MAX_PARTS)]
    for i, part in enumerate(chosen):
        share = -(-(limit * (i + 1)) // len(chosen)) - -(-(limit * i) // len(chosen))
        rows = range(part.first_row, part.first_row + min(share, part.num_rows))
        # A row may become several samples, of which a few are enough.
        yield from itertools.islice(get_builder(reading.builder).iter_part(part, options, rows), 4 * share)


def _check(item: Sample | SkippedRow, trial: Trial, limits: ImageLimits | None) -> tuple[str, str] | None:
    """Return the skip reason and the detail of a row that cannot be used; None for a sample."""
    if isinstance(item, SkippedRow):
        return item.reason, item.detail
    if limits is not None:
        try:
            infos = [check_image(data, limits, True) for data in item.images]
        except SkipSample as skip:
            return skip.reason, skip.detail
        trial.sizes += [(info.width, info.height) for info in infos]
    return None
