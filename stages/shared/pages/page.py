"""report.html, the page of an artifact, and the model card: their Jinja environment, over the files of templates/.

A page is one file that loads nothing. It shows the figures of report.json, the contents of the artifact (samples,
tokens or bins, from `stages/shared/preview/`), the sections of report.json, the settings and the files.

`.html.j2` templates escape every value except `Markup`, which only another template makes. A page runs its own script,
named by its digest, if it has contents to walk through; it runs no other.
"""

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from dataset_builders.contracts.manifest import Manifest, flatten
from dataset_builders.storage.store import StorePath, is_local
from stages.shared.pages.report import Section, Table, read_report, section_data

REPORT_HTML = "report.html"
TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_FILES = 200


def artifact_page(
    directory: StorePath, manifest: Manifest, contents: str = "", shard: str = "", link_from: Path | None = None
) -> str:
    """Return the page of an artifact.

    Args:
        contents: its samples, tokens or bins: `Markup` from templates.
        shard: the only shard that the contents show; "" for all.
        link_from: the folder of the page, for links to the pages of parents; None: no links, since the page is sent
            elsewhere. Its bytes then depend on the artifact alone.
    """
    report = read_report(directory) or {"title": "Artifact", "summary": {}, "sections": []}
    fields = ((k, ", ".join(map(str, v)) if isinstance(v, list) else v) for k, v in flatten(manifest.config).items())
    settings = Table("Settings", ["field", "value"], list(fields))
    name = f"{manifest.stage} {manifest.fingerprint}"
    return render(
        "page.html.j2",
        title=report["title"],
        name=f"{name}, {shard}" if shard else name,
        made_from={"version": manifest.version, "parents": list(_parents(directory, manifest, link_from))},
        summary=report["summary"],
        contents=contents,
        sections=report["sections"],
        ends=[section_data(table) for table in (settings, _files(manifest)) if table.rows],
    )


def plain_page(
    title: str, contents: str = "", summary: Mapping[str, object] | None = None, sections: Sequence[Section] = ()
) -> str:
    """Return a page of what is no artifact: raw rows, or a shard by itself."""
    return render(
        "page.html.j2",
        title=title,
        name="",
        made_from=None,
        summary=summary or {},
        contents=contents,
        sections=[section_data(section) for section in sections],
        ends=[],
    )


def _parents(directory: StorePath, manifest: Manifest, link_from: Path | None) -> Iterator[dict[str, str | None]]:
    """Yield role and name of each parent, with a link to its page if there is one on this machine."""
    for role, parent in sorted(manifest.parents.items()):
        page, link = directory.parent.parent / parent.name / parent.fingerprint / REPORT_HTML, None
        if link_from is not None and is_local(page) and page.is_file():
            link = os.path.relpath(page.resolve(), link_from.resolve())
        yield {"role": "" if role == parent.name else role, "name": f"{parent.name} {parent.fingerprint}", "link": link}


def _files(manifest: Manifest) -> Table:
    """Return the table of the files that have a digest."""
    files = (*manifest.shards, *manifest.files)
    columns = ["name", "bytes", "SHA-256 begins", *(["samples"] if manifest.shards else [])]
    rows = [[f.name, f.size_bytes, f.sha256[:16], getattr(f, "num_samples", None)] for f in files[:_SHOWN_FILES]]
    title = f"Files: {len(files):,}" + (f", the first {_SHOWN_FILES}" if len(files) > _SHOWN_FILES else "")
    return Table(title, columns, [row[: len(columns)] for row in rows])


def render(template: str, **values: object) -> str:
    """Return the text of a page or card, from a file of templates/.

    Raises:
        jinja2.UndefinedError: the template uses a value that is not given.
    """
    text = _ENVIRONMENT.get_template(template).render(values)
    return text.encode("utf-8", "replace").decode()  # JSON may contain half a surrogate pair, a file may not


def render_part(template: str, **values: object) -> Markup:
    """Return the HTML of a part of a page, for another template."""
    return Markup(render(template, **values))


def show_value(value: object) -> str:
    """Return a value as text for people: 12,345; 0.1235; yes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if float(value).is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 image, 2 images."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numeric_columns(rows: Sequence[Sequence[object]]) -> list[bool]:
    """Return, for each column of a table, whether all its cells are numbers or empty."""
    return [all(_is_number(cell) for cell in column if cell is not None) for column in zip(*rows)]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of a card; numbers have thousands separators and are right-aligned. Foreign text is escaped, so
    that it cannot change the text around it."""
    is_number = [bool(rows) and all(map(_is_number, column)) for column in zip(*rows)] or [False] * len(columns)
    lines = [columns, ["---:" if number else "---" for number in is_number]]
    lines += [[_markdown_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(value: object) -> str:
    if _is_number(value):
        return f"{value:,}"
    return re.sub(r"([\\|`*_\[\]<>#~])", r"\\\1", " ".join(str(value).split())) or " "


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"counted": counted, "numeric_columns": _numeric_columns, "shown": show_value}
_SCRIPT = (TEMPLATES / "page.js").read_text(encoding="utf-8")
_ENVIRONMENT.globals |= {
    "table": markdown_table,
    "script": Markup(_SCRIPT),
    "script_digest": Markup(base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()),
}
