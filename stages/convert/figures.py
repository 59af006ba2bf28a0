"""Figures over the kept samples of a convert artifact, part by part: memory grows only with distinct values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.sample import SPLITS
from dataset_builders.readers.parts import Part
from dataset_builders.storage.store import StorePath
from stages.convert.plan import LEFT_OUT, Plan
from stages.convert.scan import Scan, scan_path
from stages.shared.artifacts.row_tables import read_columns

_LENGTHS = ("question_chars", "answer_chars")
_BUCKET_BITS = 18
_CANDIDATE_BUCKETS = 2000
_FREQUENT = 20


@dataclass(slots=True)
class SubsetFigures:
    """Figures of one subset: by split, samples and bytes in shards; image uses, turns, and samples left out."""

    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    pictures: int = 0
    turns: int = 0
    left_out: int = 0


@dataclass(slots=True)
class Figures:
    """Figures of the kept samples."""

    subsets: dict[str, SubsetFigures] = field(default_factory=dict)  # by name, in order of the source
    # One of _LENGTHS -> length -> number of messages of that length.
    lengths: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in _LENGTHS})
    turns_per_sample: Counter[int] = field(default_factory=Counter)  # number of turns -> number of samples
    scripts: dict[str, int] = field(default_factory=dict)  # Unicode's name of a script -> letters, most frequent first
    answers: list[tuple[str, int]] = field(default_factory=list)  # (first 60 characters, times), most frequent first

    @property
    def turns(self) -> int:
        return sum(subset.turns for subset in self.subsets.values())


def gather_figures(work: StorePath, scan: Scan, plan: Plan, parts: Mapping[int, Part]) -> Figures:
    """Compute the figures of a plan, from the scans below `work`."""
    figures = Figures()
    scripts: Counter[str] = Counter()
    buckets = np.zeros(1 << _BUCKET_BITS, np.int64)
    for number, part in parts.items():
        subset = figures.subsets.setdefault(part.subset, SubsetFigures())
        splits = plan.splits[scan.starts[number] : scan.starts[number + 1]]
        columns = (*_LENGTHS, "size", "pictures", "answer_hashes", "scripts", "letters")
        table = read_columns(scan_path(work, number), columns)
        _add_sizes(subset, table, splits)
        table = table.filter(pa.array(splits != LEFT_OUT))
        subset.turns += len(_flat(table, "answer_chars"))
        figures.turns_per_sample.update(value_counts(pc.list_value_length(table["answer_chars"])))
        for name, counter in figures.lengths.items():
            counter.update(value_counts(pc.list_flatten(table[name])))
        for script, letters in zip(pc.list_flatten(table["scripts"]).to_pylist(), _flat(table, "letters").tolist()):
            scripts[script] += letters
        np.add.at(buckets, _bucket(_flat(table, "answer_hashes")), 1)
    figures.scripts = dict(sorted(scripts.items(), key=lambda item: (-item[1], item[0])))
    figures.answers = _frequent_answers(work, scan, plan, list(parts), buckets)
    return figures


def spread(counts: Mapping[int, int]) -> np.ndarray:
    """Return (n,) int32 with each value repeated by its count, for a histogram."""
    values = sorted(counts)
    return np.repeat(np.array(values, np.int32), np.array([counts[value] for value in values], np.int64))


def value_counts(values: pa.ChunkedArray) -> dict[Any, int]:
    """Return value -> number of occurrences, in order of appearance."""
    return {count["values"]: count["counts"] for count in values.value_counts().to_pylist()}


def _add_sizes(subset: SubsetFigures, table: pa.Table, splits: np.ndarray) -> None:
    sizes = table["size"].fill_null(0).to_numpy()
    for place, split in enumerate(SPLITS):
        subset.samples[split] += int((splits == place).sum())
        subset.bytes[split] += int(sizes[splits == place].sum())
    subset.left_out += int((splits == LEFT_OUT).sum())
    uses = pc.list_value_length(table["pictures"]).fill_null(0).to_numpy()
    subset.pictures += int(uses[splits != LEFT_OUT].sum())


def _frequent_answers(
    work: StorePath, scan: Scan, plan: Plan, parts: Sequence[int], buckets: np.ndarray
) -> list[tuple[str, int]]:
    """Return the most frequent answers. `buckets` is (2^18,): the number of answers by the top bits of their hash."""
    # In bounded memory: only the answers in the fullest buckets are counted one by one, because any other answer occurs
    # at most as often as its whole bucket.
    order = np.argsort(-buckets, kind="stable")[:_CANDIDATE_BUCKETS]
    is_candidate = np.zeros(len(buckets), bool)
    is_candidate[order] = buckets[order] > 0
    counts: Counter[str] = Counter()
    for number in parts:
        table = read_columns(scan_path(work, number), ("answers", "answer_hashes"))
        table = table.filter(pa.array(plan.kept[scan.starts[number] : scan.starts[number + 1]]))
        chosen = pa.array(is_candidate[_bucket(_flat(table, "answer_hashes"))])
        counts.update(value_counts(pc.list_flatten(table["answers"]).filter(chosen)))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_FREQUENT]


def _bucket(hashes: np.ndarray) -> np.ndarray:
    return (hashes.astype(np.uint64) >> np.uint64(64 - _BUCKET_BITS)).astype(np.int64)


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return pc.list_flatten(table[name]).to_numpy()
