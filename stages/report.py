"""report.json and report.html: what a stage did, for a program and for a person.

The page is one file without external URLs, readable on a phone, and its bytes depend on its content alone.
"""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.files import write_json, write_text
from stages.histogram import Histogram, histogram_data, histogram_html, show_value

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp", b"<svg": "svg+xml"}


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
    tiles = "".join(_tile(name, value) for name, value in summary.items())
    body = f'<h1>{html.escape(title)}</h1>\n<div class="tiles">{tiles}</div>\n<main>\n'
    body += "".join(_section_html(s) for s in sections)
    write_text(directory / REPORT_HTML, _PAGE.format(title=html.escape(title), style=_STYLE, body=body + "</main>"))


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


def _section_html(section: Section) -> str:
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


_STYLE = """
:root{color-scheme:light;--ink:#1f2430;--soft:#667085;--line:#e4e7ec;--paper:#fff;--ground:#f6f7f9;--accent:#4467c4}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:28px 20px 60px;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.2;margin:0 0 18px;font-weight:650}
h2{font-size:16px;margin:0 0 10px;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(158px,1fr));gap:12px;margin-bottom:16px}
.tile,section{background:var(--paper);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 14px}
.name{color:var(--soft);font-size:13px}
.value{font-size:23px;font-weight:620;font-variant-numeric:tabular-nums;overflow-wrap:anywhere;line-height:1.3}
.value.long{font-size:14px;font-weight:560}
.lines{font-size:13px;line-height:1.45;overflow-wrap:anywhere}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
section{padding:16px 18px;min-width:0}
section.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto}
.bar{fill:var(--accent)}.bar:hover{fill:#22398a}
.grid{stroke:var(--line)}.axis{stroke:#98a2b3}
.tick,.label{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.label{fill:var(--ink)}
.note{color:var(--soft);font-size:13px;margin:8px 0 0;font-variant-numeric:tabular-nums}
.note b{color:var(--ink);font-weight:600}
.scroll{overflow:auto;max-height:560px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere;min-width:56px}
th{color:var(--soft);font-weight:500;font-size:13px;position:sticky;top:0;background:var(--paper)}
td:first-child{overflow-wrap:normal;white-space:nowrap}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;padding-right:20px}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px}
figure{margin:0;border:1px solid var(--line);border-radius:8px;overflow:hidden;background:var(--paper)}
figure img{display:block;width:100%;height:140px;object-fit:contain;background:#eef0f3;image-rendering:auto}
figcaption{padding:8px 10px;font-size:13px;line-height:1.4;white-space:pre-line;overflow-wrap:anywhere}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
@media (max-width:520px){body{padding:16px 12px 40px}h1{font-size:22px}section{padding:14px}
.tiles{grid-template-columns:repeat(2,1fr)}.pictures{grid-template-columns:repeat(2,1fr)}.value{font-size:20px}}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
