"""A histogram as figures, as JSON and as a small inline SVG whose bytes depend on the values alone."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAX_BARS = 30
_WIDEST_BAR = 56.0  # drawing units; a bar for each of two or three whole numbers would else be a wall


@dataclass(frozen=True, slots=True)
class Histogram:
    """How values spread. Values that are not finite are left out of the bars and counted beside them."""

    title: str
    values: Sequence[float]
    x_label: str


def show_value(value: object) -> str:
    """A value as text for people: 12,345; 0.1235; yes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            return str(float(value))
        if float(value).is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _numbers(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, np.float64)
    return array[np.isfinite(array)]


def _figures(values: Sequence[float]) -> dict[str, object]:
    numbers = _numbers(values)
    figures: dict[str, object] = {"count": len(numbers)}
    if len(numbers):
        median, p95 = np.percentile(numbers, [50, 95])
        named = {"min": numbers.min(), "median": median, "mean": numbers.mean(), "p95": p95, "max": numbers.max()}
        figures |= {name: round(float(value), 6) for name, value in named.items()}
    if len(numbers) < len(values):
        figures["not_finite"] = len(values) - len(numbers)
    return figures


def _bars(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts (bars,) and edges (bars + 1,); whole numbers in a small range get a bar each."""
    if not len(numbers):
        return np.zeros(0, np.int64), np.zeros(1)
    low, high = numbers.min(), numbers.max()
    whole = bool((numbers == np.round(numbers)).all())
    if whole:
        width = max(1, math.ceil((high - low + 1) / _MAX_BARS))
        edges = np.arange(low - 0.5, high + 0.5 + width, width)
        edges = edges[: np.searchsorted(edges, high) + 1]
    elif low == high:
        edges = np.array([low - 0.5, low + 0.5])
    else:
        edges = np.linspace(low, high, _MAX_BARS + 1)
    return np.histogram(numbers, edges)


def _nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers inside [low, high], about `wanted` of them."""
    raw = max((high - low) / wanted, 1e-12)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def histogram_data(histogram: Histogram) -> dict[str, object]:
    """The figures, bar edges (bars + 1,) and counts (bars,) as JSON values."""
    counts, edges = _bars(_numbers(histogram.values))
    bars = {"edges": [float(e) for e in edges], "counts": [int(c) for c in counts]}
    return {"x_label": histogram.x_label, **_figures(histogram.values), **bars}


def histogram_html(histogram: Histogram) -> str:
    """The plot and a line of figures under it, as an HTML fragment."""
    figures = _figures(histogram.values)
    note = " &middot; ".join(f"{name.replace('_', ' ')} <b>{show_value(value)}</b>" for name, value in figures.items())
    if not figures["count"]:
        return '<p class="note">no values</p>'
    return f'{_histogram_svg(histogram)}\n<p class="note">{note}</p>'


def _histogram_svg(histogram: Histogram, width: int = 440, height: int = 210) -> str:
    counts, edges = _bars(_numbers(histogram.values))
    left, right, top, bottom = 46, 8, 8, 40
    x_scale = (width - left - right) / (edges[-1] - edges[0])
    y_scale = (height - top - bottom) / counts.max()
    base = height - bottom
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(histogram.title)}">']
    for tick in _nice_ticks(0, float(counts.max()), 5):
        if tick == round(tick):
            y = base - tick * y_scale
            parts.append(f'<path class="grid" d="M{left} {y:.1f}H{width - right}"/>')
            parts.append(
                f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{show_value(tick)}</text>'
            )
    for count, start, end in zip(counts, edges, edges[1:]):
        room = (end - start) * x_scale
        bar = min(room - min(1.5, room * 0.12), _WIDEST_BAR)
        x = left + (start - edges[0]) * x_scale + (room - bar) / 2
        tall = max(count * y_scale, 1.0 if count else 0.0)
        parts.append(
            f'<rect class="bar" x="{x:.2f}" y="{base - tall:.2f}" width="{bar:.2f}" '
            f'height="{tall:.2f}"><title>{_bar_name(start, end)}: {show_value(count)}</title></rect>'
        )
    for tick in _x_ticks(counts, edges):
        x = left + (tick - edges[0]) * x_scale
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 16}" text-anchor="middle">{show_value(tick)}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<path class="axis" d="M{left} {base}H{width - right}"/>')
    label = html.escape(histogram.x_label)
    parts.append(f'<text class="label" x="{middle:.1f}" y="{height - 6}" text-anchor="middle">{label}</text></svg>')
    return "".join(parts)


def _x_ticks(counts: np.ndarray, edges: np.ndarray) -> list[float]:
    if len(counts) == 1:
        return [float(edges.mean())]
    ticks = _nice_ticks(float(edges[0]), float(edges[-1]), 6)
    whole = (edges + 0.5 == np.round(edges + 0.5)).all()
    return [t for t in ticks if not whole or abs(t - round(t)) < 1e-9]


def _bar_name(start: float, end: float) -> str:
    """The values a bar counts, for its tooltip."""
    if (start + 0.5).is_integer() and (end - 0.5).is_integer():
        first, last = start + 0.5, end - 0.5
        return show_value(first) if first == last else f"{show_value(first)} to {show_value(last)}"
    return f"{show_value(start)} to {show_value(end)}"
