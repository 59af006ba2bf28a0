"""report.html, the page of an artifact, and the model card: their Jinja environment, over the files of templates/.

A page is one file that loads nothing. Its head says what it is of and links the pages before it (see `lineage.py`). It
shows the figures of report.json, the contents of the artifact (samples, tokens or bins, from `stages/shared/preview/`),
the sections of report.json, the settings and the files.

`.html.j2` templates escape every value except `Markup`, which only another template makes. A page runs its own script,
named by its digest, if it has contents to walk through; it runs no other.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from dataset_builders.contracts.manifest import Manifest, flatten
from dataset_builders.storage.store import StorePath
from stages.shared.pages.lineage import Lineage, side_of
from stages.shared.pages.report import Section, Table, read_report, section_data
from stages.shared.pages.shown_numbers import counted, show_share, show_value

TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_FILES = 200


def artifact_page(
    directory: StorePath,
    manifest: Manifest,
    contents: str = "",
    shard: str = "",
    home: StorePath | None = None,
    link_from: Path | None = None,
) -> str:
    """Return the page of an artifact.

    Args:
        contents: its samples, tokens or bins: `Markup` from templates.
        shard: the only shard that the contents show; "" for all.
        home: the artifact's directory in its root, if the files are still elsewhere; None: `directory`.
        link_from: the folder of the page, if it is not the artifact's, see `Lineage`.
    """
    report = read_report(directory) or {"title": "Artifact", "summary": {}, "sections": []}
    fields = ((k, ", ".join(map(str, v)) if isinstance(v, list) else v) for k, v in flatten(manifest.config).items())
    settings = Table("Settings", ["field", "value"], list(fields))
    name = f"{manifest.stage} {manifest.fingerprint}"
    return render(
        "page.html.j2",
        title=" ".join(filter(None, (report["title"], side_of(manifest)))),
        name=f"{name}, {shard}" if shard else name,
        version=manifest.version,
        head=list(Lineage(home or directory, manifest, link_from).facts()),
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
        version=None,
        head=[],
        summary=summary or {},
        contents=contents,
        sections=[section_data(section) for section in sections],
        ends=[],
    )


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
        return show_value(value)
    return re.sub(r"([\\|`*_\[\]<>#~])", r"\\\1", " ".join(str(value).split())) or " "


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    "counted": counted,
    "numeric_columns": _numeric_columns,
    "share": show_share,
    "shown": show_value,
}
_SCRIPT = (TEMPLATES / "page.js").read_text(encoding="utf-8")
_ENVIRONMENT.globals |= {
    "table": markdown_table,
    "script": Markup(_SCRIPT),
    "script_digest": Markup(base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()),
}
