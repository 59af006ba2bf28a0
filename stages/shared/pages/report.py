"""report.json: the figures, tables and images of a stage, from which its page is made. See `page.py`."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import preview_png
from dataset_builders.storage.files import read_object, write_text
from dataset_builders.storage.store import StorePath
from dataset_builders.videos.sheet import contact_sheet
from stages.shared.pages.shown_numbers import counted

REPORT_JSON, REPORT_HTML = "report.json", "report.html"
_MAX_BARS = 30
_FORMATS = {b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain values; columns of numbers are right-aligned and have thousands separators."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded image (PNG, JPEG, WebP, GIF), which is embedded unchanged, so it must be small.

    Attributes:
        shows: what the image shows, for a reader who does not see it.
        caption: plain text below the image.
        boxes: boxes over the image, from `drawn_boxes`; None: none are drawn.
    """

    image: bytes
    shows: str
    caption: str
    boxes: Mapping[str, Any] | None = None

    @classmethod
    def of_sample(cls, sample: Sample, side: int, caption: str) -> "Picture":
        """Return all images of a sample beside each other, each at most side x side pixels; without images, some frames
        of its first video. The sample has one of both."""
        if sample.images:
            shows = f"{counted(len(sample.images), 'image')} of {sample.key}"
            return cls(preview_png(sample.images, side), shows, caption)
        png, times, _ = contact_sheet(sample.videos[0], side // 2)
        shown_at = ", ".join(f"{time:.2f}" for time in times)
        return cls(png, f"frames of the first video of {sample.key} at {shown_at} s", f"{caption}\n(at {shown_at} s)")


@dataclass(frozen=True, slots=True)
class Pictures:
    """Images with captions."""

    title: str
    items: Sequence[Picture]


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of values. Values that are not finite are in no bar; they are counted separately."""

    title: str
    values: Sequence[float]
    x_label: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG file of a drawing library. The page shows it as an image, so that nothing in it can run. `shows` says what
    it shows, for a reader who does not see it."""

    title: str
    svg: str
    shows: str


Section = Table | Pictures | Histogram | Drawing


def write_report(
    directory: StorePath, *, title: str, summary: Mapping[str, object], sections: Sequence[Section]
) -> None:
    """Write report.json to an existing directory.

    Args:
        title: the page's heading, plain text.
        summary: name -> number, text, or a flat mapping of those, as JSON values; shown as tiles.
        sections: shown in this order; histograms and drawings are side by side if the screen is wide enough.
    """
    data = {"title": title, "summary": summary, "sections": [section_data(section) for section in sections]}
    write_text(directory / REPORT_JSON, json.dumps(_finite(data), indent=1) + "\n")  # keys are not sorted


def read_report(directory: StorePath) -> dict[str, Any] | None:
    """Read report.json: `title`, `summary` and `sections` for the page. None if there is no valid report."""
    try:
        report = read_object(directory / REPORT_JSON, "")
    except InputError:
        return None
    return report if report.keys() >= {"title", "summary", "sections"} else None


def section_data(section: Section) -> dict[str, Any]:
    """Return one section in the form of report.json and the templates."""
    match section:
        case Table():
            assert all(len(row) == len(section.columns) for row in section.rows), (
                f"{section.title}: a row of another length"
            )
            rows = [[_plain(cell) for cell in row] for row in section.rows]
            data = {"kind": "table", "columns": list(section.columns), "rows": rows}
        case Pictures():
            images = [
                {"source": data_uri(p.image), "shows": p.shows, "caption": p.caption, "boxes": p.boxes}
                for p in section.items
            ]
            data = {"kind": "pictures", "images": images}
        case Histogram():
            data = {"kind": "histogram", **_histogram_data(section)}
        case Drawing():
            source = f"data:image/svg+xml;base64,{_base64(section.svg.encode())}"
            data = {"kind": "drawing", "source": source, "shows": section.shows}
    return {"title": section.title, **data}


def data_uri(image: bytes) -> str:
    """Return the source of an <img> for an encoded image."""
    kind = next((name for magic, name in _FORMATS.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{_base64(image)}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _histogram_data(histogram: Histogram) -> dict[str, Any]:
    """Return the figures of all finite values, and the bars: number of values, first and last value of the range."""
    values = np.asarray(histogram.values, np.float64)
    numbers = values[np.isfinite(values)]
    figures: dict[str, float] = {"count": len(numbers)}
    if len(numbers):
        median, p95 = np.percentile(numbers, [50, 95])
        named = {"min": numbers.min(), "median": median, "mean": numbers.mean(), "p95": p95, "max": numbers.max()}
        figures |= {name: float(f"{value:.9g}") for name, value in named.items()}
    if len(numbers) < len(values):
        figures["not finite"] = len(values) - len(numbers)
    return {"x_label": histogram.x_label, "figures": figures, "bars": _bars(numbers) if len(numbers) else []}


def _bars(numbers: np.ndarray) -> list[dict[str, float]]:
    """Return the bars; each whole number of a small range has a bar of its own."""
    low, high = numbers.min(), numbers.max()
    inset = 0.0
    if (numbers == np.round(numbers)).all():
        inset = 0.5  # a bar of whole numbers reaches half a number beyond its first and its last one
        width = max(1.0, np.ceil((high - low + 1) / _MAX_BARS))
        edges = low - inset + width * np.arange(np.ceil((high - low + 1) / width) + 1)
    else:
        edges = np.linspace(low, high, _MAX_BARS + 1) if low < high else np.array([low - 0.5, low + 0.5])
    counts, _ = np.histogram(numbers, edges)
    ranges = zip(counts.tolist(), (edges[:-1] + inset).tolist(), (edges[1:] - inset).tolist())
    return [{"count": count, "first": first, "last": last} for count, first, last in ranges]


def _plain(cell: object) -> object:
    value = cell.item() if isinstance(cell, np.generic) else cell
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _finite(value: object) -> object:
    """Return the value with None for floats that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
