"""report.json and report.html: the result of a stage, for programs and for people.

report.json has everything that the page shows, including images; the page and a preview are rendered from it.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from dataset_builders.errors import InputError
from dataset_builders.storage.files import read_object, write_text
from dataset_builders.storage.store import StorePath
from stages.pages.histogram import Histogram, histogram_data
from stages.pages.page import render

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
_FORMAT_VERSION = 2  # 2: images are in report.json
_FORMATS = {b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain values; columns of numbers are right-aligned and have thousands separators."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Encoded images (PNG, JPEG, WebP, GIF) with plain captions. They are embedded unchanged, so they must be small."""

    title: str
    items: Sequence[tuple[bytes, str]]


@dataclass(frozen=True, slots=True)
class Text:
    """HTML from a template or a drawing library, with all foreign text escaped."""

    title: str
    html: Markup


Section = Histogram | Table | Pictures | Text


def write_report(directory: Path, *, title: str, summary: dict[str, object], sections: Sequence[Section]) -> None:
    """Write report.json (summary and sections) and report.html (one self-contained page) to `directory`.

    Args:
        directory: an existing directory.
        title: the page's heading, plain text.
        summary: name -> number, text, or a flat mapping of those, as JSON values; shown as tiles.
        sections: shown in this order; histograms are side by side if the screen is wide enough.
    """
    data = {
        "format_version": _FORMAT_VERSION,
        "title": title,
        "summary": summary,
        "sections": [section_data(section) for section in sections],
    }
    write_text(directory / REPORT_JSON, json.dumps(_finite(data), indent=1) + "\n")  # keys are not sorted
    write_text(directory / REPORT_HTML, render("page.html.j2", **data))


def read_report(directory: StorePath) -> dict[str, Any] | None:
    """Read report.json: `title`, `summary` and `sections` for templates. None if there is no valid report, or only one
    of an older format, which lacks images."""
    try:
        data = read_object(directory / REPORT_JSON, "")
    except InputError:
        return None
    return data if data.get("format_version") == _FORMAT_VERSION else None


def section_data(section: Section) -> dict[str, Any]:
    """Return one section in the form of report.json and the templates."""
    match section:
        case Histogram():
            data = {"kind": "histogram", **histogram_data(section)}
        case Table():
            assert all(len(row) == len(section.columns) for row in section.rows), (
                f"{section.title}: a row of another length"
            )
            rows = [[_plain(cell) for cell in row] for row in section.rows]
            data = {"kind": "table", "columns": list(section.columns), "rows": rows}
        case Pictures():
            captions = [caption for _, caption in section.items]
            data = {
                "kind": "pictures",
                "captions": captions,
                "sources": [data_uri(image) for image, _ in section.items],
            }
        case Text():
            data = {"kind": "text", "html": section.html}
    return {"title": section.title, **data}


def data_uri(image: bytes) -> str:
    """Return the source of an <img> for an encoded image."""
    kind = next((name for magic, name in _FORMATS.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


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
