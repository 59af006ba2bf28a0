"""The raw rows that are read: the parts of all sources, and the rows chosen if there are more than convert.max_rows.

Every row has a pseudorandom draw: a hash of its subset's name and its number in the subset. The rows with the smallest
draws are chosen. The choice is therefore the same in every run and for any division of the rows into files, and a
smaller choice is a subset of a larger one.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.contracts.sample import Sample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.readers.parts import Part, parts_of
from dataset_builders.sources.registry import get_builder
from stages.convert.config import ConvertConfig, subset_prefix
from stages.shared.artifacts.artifact import Input

_CHUNK = 1 << 22  # number of rows hashed at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRows:
    """Parts of the sources by number, and the builders that read their rows."""

    parts: Mapping[int, Part]
    readers: Mapping[int, tuple[str, StrictModel]]  # name of the part's builder, and its options

    def origins(self) -> dict[str, SubsetOrigin]:
        """Return subset -> the rows that it is made from, in order of the parts."""
        return {
            part.subset: SubsetOrigin(builder=self.readers[number][0], name=part.own_subset)
            for number, part in self.parts.items()
        }

    def not_read(self) -> Counter[str]:
        """Return what the builders leave out within the rows of all parts, in words -> how often."""
        counts: Counter[str] = Counter()
        for number, part in self.parts.items():
            name, options = self.readers[number]
            if (count := get_builder(name).not_read) is not None:
                counts.update(count(part, options))
        return counts

    def read(self, number: int, keys: Sequence[str]) -> Iterator[Sample]:
        """Yield the samples of a part with these keys, in the order of the source."""
        part, (builder, options), chosen_keys = self.parts[number], self.readers[number], set(keys)
        num_samples = 0
        for item in get_builder(builder).iter_part(part, options, {part.row(key) for key in keys}):
            if isinstance(item, Sample) and item.key in chosen_keys:
                num_samples += 1
                yield item
        if num_samples != len(chosen_keys):
            raise change_error(part)


def list_rows(config: ConvertConfig, inputs: Mapping[str, Input]) -> tuple[RawRows, Sequence[np.ndarray | None], int]:
    """Return the parts to read, the chosen rows of each (None: all), and the number of raw rows in all sources."""
    parts: list[Part] = []
    readers: list[tuple[str, StrictModel]] = []
    for role, reading in config.readings.items():
        builder, source = get_builder(reading.builder), inputs[role].dir
        options = builder.options.model_validate(reading.options)
        found = parts_of(builder, source, reading.subsets, options, reading.heldout_files)
        if not any(part.num_rows for part in found):
            raise InputError(f"the files below {source} hold no rows; give a source with some")
        prefix = subset_prefix(role)
        parts += [dataclasses.replace(part, subset=f"{prefix}{part.subset}", prefix=prefix) for part in found]
        readers += [(reading.builder, options)] * len(found)
    assert_parts_apart(parts)
    source_rows = sum(part.num_rows for part in parts)
    chosen: Sequence[np.ndarray | None] = [None] * len(parts)
    if config.max_rows is not None and config.max_rows < source_rows:
        rows_of = zip(parts, readers, choose_rows(parts, config.max_rows))
        parts, readers, chosen = zip(*((part, reader, rows) for part, reader, rows in rows_of if len(rows)))
    return RawRows(parts=dict(enumerate(parts)), readers=dict(enumerate(readers))), chosen, source_rows


def assert_parts_apart(parts: Sequence[Part]) -> None:
    """Check that no two parts hold the same row of a subset, so that no two samples have the same key."""
    spans = sorted((part.subset, part.first_row, part.num_rows, part.name) for part in parts)
    for (subset, first, rows, name), (next_subset, next_first, _, next_name) in pairwise(spans):
        assert subset != next_subset or first + rows <= next_first, f"{name} and {next_name} share keys of {subset}"


def choose_rows(parts: Sequence[Part], max_rows: int) -> list[np.ndarray]:
    """Return (m,) int64 for each part, ascending: the chosen row numbers of its subset; `max_rows` in all, or all."""
    # Rows whose draws are certainly too large are dropped chunk by chunk, so memory grows with `max_rows` alone.
    starts = np.concatenate([[0], np.cumsum([part.num_rows for part in parts])]).astype(np.int64)
    total = int(starts[-1])
    share = min(1.0, max_rows / max(1, total))
    bound = share + 8 * math.sqrt(share / max(1, total))  # plus 8 standard deviations: a second pass is unlikely
    while True:
        places, draws = _below(parts, starts, bound)
        if len(places) >= max_rows or bound >= 1:
            break
        bound *= 2
    if len(places) > max_rows:
        last = np.partition(draws, max_rows - 1)[max_rows - 1]
        smaller, equal = places[draws < last], places[draws == last]
        places = np.sort(np.concatenate([smaller, equal[: max_rows - len(smaller)]]))
    pieces = np.split(places, np.searchsorted(places, starts[1:-1]))
    return [piece - start + part.first_row for part, start, piece in zip(parts, starts, pieces)]


def _below(parts: Sequence[Part], starts: np.ndarray, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' indices over all parts, ascending (int64), and draws (uint64), for draws under bound * 2^64."""
    limit = np.uint64(min(2**64 - 1, int(bound * 2.0**64)))
    found = [(places[draws <= limit], draws[draws <= limit]) for places, draws in _draws(parts, starts)]
    return np.concatenate([places for places, _ in found]), np.concatenate([draws for _, draws in found])


def _draws(parts: Sequence[Part], starts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (indices over all parts, draws) of all rows, some parts at a time."""
    seed_of = {part.subset: xxhash.xxh3_64_intdigest(part.subset.encode()) for part in parts}
    seeds = np.array([seed_of[part.subset] for part in parts], np.uint64)
    offsets = np.array([part.first_row for part in parts], np.int64) - starts[:-1]
    begin = 0
    while begin < len(parts):
        end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + _CHUNK, side="right")) - 1)
        lengths = np.diff(starts[begin : end + 1])
        places = np.arange(starts[begin], starts[end], dtype=np.int64)
        rows = places + np.repeat(offsets[begin:end], lengths)
        yield places, _hash(rows.astype(np.uint64), np.repeat(seeds[begin:end], lengths))
        begin = end


def _hash(rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return (n,) uint64: SplitMix64's mixing function of rows and seeds; the hashes within a subset are distinct."""
    mixed = rows * np.uint64(0x9E3779B97F4A7C15) + seeds
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def change_error(part: Part) -> InputError:
    return InputError(f"{part.path} changed while it was converted; run the same command again")
