"""The choice of rows if the source holds more than convert.max_rows.

Every row has a pseudorandom draw: a hash of its subset's name and its number in the subset. The rows with the smallest
draws are chosen. The choice is therefore the same in every run and for any division of the rows into files, and a
smaller choice is a subset of a larger one.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from dataset_builders.readers.parts import Part

_CHUNK = 1 << 22  # number of rows hashed at a time


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
