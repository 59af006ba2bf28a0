"""What every preview ends with: where an artifact comes from, its settings, its shards, and its own report."""

import html
import os
from collections.abc import Collection
from pathlib import Path

from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.contracts.manifest import MANIFEST, Manifest
from dataset_builders.contracts.store import StorePath, is_local
from stages.artifact import Artifact
from stages.report import REPORT_HTML, Report, Table, Text, section_html, tiles_html

_SHOWN_SHARDS = 200
_SHOWN_FIGURES = 300


def summary_tiles(artifact: Artifact, report: Report | None) -> str:
    """The figures that a person looks for first: the report's, or the manifest's counts."""
    return tiles_html(report.summary if report else _counts(artifact.manifest))


def _counts(manifest: Manifest) -> dict[str, object]:
    counts: dict[str, object] = {}
    if manifest.shards:
        counts = {"samples": manifest.num_samples, "shards": len(manifest.shards)}
    if manifest.skips:
        counts["left out"] = dict(manifest.skips)
    return counts


def about_html(artifact: Artifact, report: Report | None, without: Collection[str], link_from: Path | None) -> str:
    """Sections: the report but for its kinds `without`, parents, settings, shards, figures.

    Args:
        link_from: the folder of the page, from which links to parents lead; None: the page goes elsewhere, no links.
    """
    manifest = artifact.manifest
    settings = Table("Settings", ["field", "value"], [[k, _shown(v)] for k, v in flatten(manifest.config).items()])
    sections = [Text("Made from", _parents(artifact, link_from)), settings]
    if manifest.shards:
        sections.append(_shards(manifest))
    figures = flatten(manifest.stats)
    rows = [[name, _shown(value)] for name, value in list(figures.items())[:_SHOWN_FIGURES]]
    title = "Figures of the manifest" + (f", the first {_SHOWN_FIGURES}" if len(figures) > _SHOWN_FIGURES else "")
    sections.append(_folded(title, Table(title, ["figure", "value"], rows)))
    own = [section.html for section in report.sections if section.kind not in without] if report else []
    return f"<main>\n{''.join(own)}{''.join(map(section_html, sections))}</main>\n"


def _parents(artifact: Artifact, link_from: Path | None) -> str:
    manifest = artifact.manifest
    lines = [f"stage {html.escape(manifest.stage)}, version {manifest.version}, fingerprint {manifest.fingerprint}"]
    for role, parent in sorted(manifest.parents.items()):
        directory = artifact.dir.parent.parent / parent.name / parent.fingerprint
        name = f"{html.escape(parent.name)}/{html.escape(parent.fingerprint)}"
        if (directory / MANIFEST).is_file():
            where = _link(directory, link_from, name)
        else:
            where = f"{name} (no artifact beside this one)"
        lines.append(f"{html.escape(role)}: {where}")
    return "".join(f'<p class="note"><b>{line}</b></p>' for line in lines)


def _link(directory: StorePath, link_from: Path | None, name: str) -> str:
    """The parent's name, leading to its report where the page and the parent lie on one machine."""
    target = directory / REPORT_HTML
    if link_from is None or not is_local(directory) or not target.is_file():
        return name
    return f'<a href="{html.escape(os.path.relpath(target.resolve(), link_from.resolve()))}">{name}</a>'


def _shards(manifest: Manifest) -> Table:
    shown = manifest.shards[:_SHOWN_SHARDS]
    rows = [[s.name, s.num_samples, round(s.size_bytes / 1e6, 3), s.sha256[:16]] for s in shown]
    total = len(manifest.shards)
    title = f"Shards: {total:,}" + (f", the first {_SHOWN_SHARDS}" if total > _SHOWN_SHARDS else "")
    return Table(title, ["name", "samples", "MB", "sha256"], rows)


def _folded(title: str, table: Table) -> Text:
    if not table.rows:
        return Text(title, '<p class="note">none</p>')
    inside = section_html(Table("", table.columns, table.rows)).partition("</h2>\n")[2].removesuffix("\n</section>\n")
    return Text(title, f"<details><summary>{len(table.rows)} lines</summary>\n{inside}\n</details>")


def _shown(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value
