"""report.json and report.html: what a stage did, for a program and for a person.

The page is one file without external URLs, readable on a phone, and its bytes depend on its content alone.
"""

import base64
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataset_builders.contracts.files import write_json, write_text
from dataset_builders.contracts.store import StorePath
from stages.histogram import Histogram, histogram_data, histogram_html, show_value
from stages.page import render_page

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp", b"<svg": "svg+xml"}
_SECTION = re.compile(r'<section class="(?:plot|wide)"><h2>.*?</section>\n', re.S)  # as `section_html` writes one


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain values; numbers are set right-aligned with thousands separators."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Encoded images (PNG, JPEG, WebP, GIF) with plain captions; embedded as they are, so hand in small ones."""

    title: str
    items: Sequence[tuple[bytes, str]]


@dataclass(frozen=True, slots=True)
class Text:
    """A trusted HTML fragment: the caller has put everything foreign through html.escape."""

    title: str
    html: str


Section = Histogram | Table | Pictures | Text


def write_report(directory: Path, *, title: str, summary: dict[str, object], sections: Sequence[Section]) -> None:
    """Write report.json (summary and the sections' data) and report.html (one self-contained page) into `directory`.

    Args:
        directory: an existing directory.
        title: the page's heading, plain text.
        summary: name -> number, text, or a flat mapping of those; shown as tiles. Must be JSON.
        sections: shown in this order; histograms stand side by side where the screen is wide enough.
    """
    data = {"title": title, "summary": summary, "sections": [_section_data(s) for s in sections]}
    write_json(directory / REPORT_JSON, _finite(data))
    body = f"<h1>{html.escape(title)}</h1>\n{tiles_html(summary)}\n<main>\n"
    body += "".join(section_html(s) for s in sections)
    write_text(directory / REPORT_HTML, render_page(title, body + "</main>"))


@dataclass(frozen=True, slots=True)
class ReadSection:
    """A section of a report as it was written: its kind in report.json, and its whole HTML."""

    kind: Literal["histogram", "table", "pictures", "text"]
    html: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `write_report` wrote."""

    summary: dict[str, object]
    sections: list[ReadSection]


def read_report(directory: StorePath) -> Report | None:
    """A stage's report; None where it wrote none, or one of another make."""
    try:
        data = json.loads((directory / REPORT_JSON).read_text(encoding="utf-8"))
        blocks = _SECTION.findall((directory / REPORT_HTML).read_text(encoding="utf-8"))
        kinds = [section["kind"] for section in data["sections"]]
        return Report(data["summary"], [ReadSection(kind, block) for kind, block in zip(kinds, blocks, strict=True)])
    except (FileNotFoundError, KeyError, ValueError):
        return None


def tiles_html(summary: Mapping[str, object]) -> str:
    """The summary's values as tiles."""
    return f'<div class="tiles">{"".join(_tile(name, value) for name, value in summary.items())}</div>'


def _section_data(section: Section) -> dict[str, object]:
    match section:
        case Histogram():
            data = {"kind": "histogram", **histogram_data(section)}
        case Table():
            rows = [[_json_cell(cell) for cell in row] for row in section.rows]
            data = {"kind": "table", "columns": list(section.columns), "rows": rows}
        case Pictures():
            data = {"kind": "pictures", "captions": [caption for _, caption in section.items]}
        case Text():
            data = {"kind": "text", "html": section.html}
    return {"title": section.title, **data}


def _json_cell(cell: object) -> object:
    return cell if cell is None or isinstance(cell, (str, int, float)) else str(cell)


def _finite(value: object) -> object:
    """The same value with None for floats that JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def section_html(section: Section) -> str:
    """One section as it stands on a page."""
    match section:
        case Histogram():
            kind, inside = "plot", histogram_html(section)
        case Table():
            kind, inside = "wide", _table_html(section)
        case Pictures():
            kind, inside = "wide", f'<div class="pictures">{"".join(_figure(*item) for item in section.items)}</div>'
        case Text():
            kind, inside = "wide", section.html
    return f'<section class="{kind}"><h2>{html.escape(section.title)}</h2>\n{inside}\n</section>\n'


def _tile(name: str, value: object) -> str:
    label = html.escape(name.replace("_", " "))
    if isinstance(value, dict):
        lines = "".join(
            f"<div>{html.escape(str(k))} <b>{html.escape(show_value(v))}</b></div>" for k, v in value.items()
        )
        return f'<div class="tile"><div class="name">{label}</div><div class="lines">{lines}</div></div>'
    shown = html.escape(show_value(value))
    size = " long" if len(shown) > 14 else ""
    return f'<div class="tile"><div class="name">{label}</div><div class="value{size}">{shown}</div></div>'


def _table_html(table: Table) -> str:
    if not table.rows:
        return '<p class="note">none</p>'
    head = "".join(f"<th{_align([row[i] for row in table.rows])}>{html.escape(c)}</th>" for i, c in _columns(table))
    rows = "".join(
        "<tr>" + "".join(f"<td{_align([cell])}>{html.escape(show_value(cell))}</td>" for cell in row) + "</tr>\n"
        for row in table.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def _columns(table: Table) -> list[tuple[int, str]]:
    assert all(len(row) == len(table.columns) for row in table.rows), f"{table.title}: a row of another length"
    return list(enumerate(table.columns))


def _align(cells: list[object]) -> str:
    numbers = all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in cells if c is not None)
    return ' class="n"' if numbers else ""


def _figure(image: bytes, caption: str) -> str:
    webp = image[:4] == b"RIFF" and image[8:12] == b"WEBP"
    kind = "webp" if webp else next((k for magic, k in _MAGIC.items() if image.startswith(magic)), "png")
    data = base64.b64encode(image).decode("ascii")
    text = html.escape(caption)
    return f'<figure><img alt="" src="data:image/{kind};base64,{data}"><figcaption>{text}</figcaption></figure>'
