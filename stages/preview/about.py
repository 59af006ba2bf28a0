"""The end of every preview: the artifact's own report, its parents, its settings and its shards."""

import os
from collections.abc import Collection
from pathlib import Path

from dataset_builders.contracts.fingerprint import flatten
from dataset_builders.contracts.manifest import MANIFEST, Manifest
from dataset_builders.storage.store import is_local
from stages.artifacts.artifact import Artifact
from stages.pages.report import REPORT_HTML, Table, read_report, section_data

_SHOWN_SHARDS = 200
_SHOWN_FIGURES = 300


def about_artifact(artifact: Artifact, without: Collection[str], link_from: Path | None) -> dict[str, object]:
    """Return the values of preview.html.j2 that are common to every kind of artifact.

    Args:
        without: kinds of report sections that the page shows in its own way.
        link_from: the folder of the page, for links to parents; None: no links, since the page will be moved.
    """
    manifest, report = artifact.manifest, read_report(artifact.dir)
    sections = [section for section in report["sections"] if section["kind"] not in without] if report else []
    settings = Table("Settings", ["field", "value"], [[k, _as_text(v)] for k, v in flatten(manifest.config).items()])
    all_figures = flatten(manifest.stats)
    figures = [[name, _as_text(value)] for name, value in list(all_figures.items())[:_SHOWN_FIGURES]]
    title = "Figures of the manifest"
    if len(all_figures) > len(figures):
        title += f", the first {_SHOWN_FIGURES}"
    return {
        "manifest": manifest,
        "tiles": report["summary"] if report else _counts(manifest),
        "sections": sections,
        "parents": _parents(artifact, link_from),
        "about_sections": [section_data(settings), *([section_data(_shards(manifest))] if manifest.shards else [])],
        "figures": section_data(Table(title, ["figure", "value"], figures)),
    }


def _counts(manifest: Manifest) -> dict[str, object]:
    counts: dict[str, object] = {}
    if manifest.shards:
        counts = {"samples": manifest.num_samples, "shards": len(manifest.shards)}
    if manifest.skips:
        counts["left out"] = dict(manifest.skips)
    return counts


def _parents(artifact: Artifact, link_from: Path | None) -> list[dict[str, object]]:
    """Return role and name of each parent, with a link to its report if the page and the parent are on one machine."""
    parents = []
    for role, parent in sorted(artifact.manifest.parents.items()):
        directory = artifact.dir.parent.parent / parent.name / parent.fingerprint
        page, link = directory / REPORT_HTML, None
        if link_from is not None and is_local(directory) and page.is_file():
            link = os.path.relpath(page.resolve(), link_from.resolve())
        # The text of a page that will be moved must not depend on whether the parent exists here.
        is_here = link_from is None or (directory / MANIFEST).is_file()
        parents.append({"role": role, "name": f"{parent.name}/{parent.fingerprint}", "is_here": is_here, "link": link})
    return parents


def _shards(manifest: Manifest) -> Table:
    rows = [[s.name, s.num_samples, round(s.size_bytes / 1e6, 3), s.sha256[:16]] for s in manifest.shards]
    title = f"Shards: {len(rows):,}" + (f", the first {_SHOWN_SHARDS}" if len(rows) > _SHOWN_SHARDS else "")
    return Table(title, ["name", "samples", "MB", "sha256"], rows[:_SHOWN_SHARDS])


def _as_text(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value
