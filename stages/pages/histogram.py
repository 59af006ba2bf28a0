"""A histogram as figures and bars, for report.json; a template draws it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MAX_BARS = 30


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of values. Values that are not finite are in no bar; they are counted separately."""

    title: str
    values: Sequence[float]
    x_label: str


def histogram_data(histogram: Histogram) -> dict[str, Any]:
    """Return figures, bar edges (bars + 1,) and counts (bars,) as JSON values; both lists are empty without values."""
    values = np.asarray(histogram.values, np.float64)
    numbers = values[np.isfinite(values)]
    data: dict[str, Any] = {"x_label": histogram.x_label, "count": len(numbers), "edges": [], "counts": []}
    if len(numbers):
        median, p95 = np.percentile(numbers, [50, 95])
        named = {"min": numbers.min(), "median": median, "mean": numbers.mean(), "p95": p95, "max": numbers.max()}
        counts, edges = np.histogram(numbers, _edges(numbers))
        data |= {name: float(f"{value:.9g}") for name, value in named.items()}
        data |= {"edges": edges.tolist(), "counts": counts.tolist()}
    if len(numbers) < len(values):
        data["not_finite"] = len(values) - len(numbers)
    return data


def _edges(numbers: np.ndarray) -> np.ndarray:
    """Return the edges (bars + 1,) of the bars; each whole number of a small range has a bar of its own."""
    low, high = numbers.min(), numbers.max()
    if (numbers == np.round(numbers)).all():
        width = max(1.0, np.ceil((high - low + 1) / _MAX_BARS))
        return low - 0.5 + width * np.arange(np.ceil((high - low + 1) / width) + 1)
    return np.linspace(low, high, _MAX_BARS + 1) if low < high else np.array([low - 0.5, low + 0.5])


def bars(data: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Yield the bars of `histogram_data`: number of values, first and last value of the range."""
    is_whole = all((edge + 0.5).is_integer() for edge in data["edges"])
    for count, start, end in zip(data["counts"], data["edges"], data["edges"][1:]):
        first, last = (start + 0.5, end - 0.5) if is_whole else (start, end)
        yield {"count": count, "first": first, "last": last}
