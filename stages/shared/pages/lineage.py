"""The head of a page: the model and the data of an artifact, the artifacts that it was made from, and their pages.

All of it follows from the manifests of the artifact and of those before it. An artifact cannot name what was made from
it later, nor a run, since every run with the same settings reuses it. So the page of `release`, the last stage, links
the pages of all stages before it.
"""

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from dataset_builders.contracts.manifest import Manifest, Parent, load_manifest
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, is_local
from stages.shared.pages.report import REPORT_HTML
from stages.shared.pages.shown_numbers import counted

# Roles of the inputs through which the model of an artifact is found.
_TO_MODEL = ("answers", "tuned", "export", "train", "hf", "model")
_SHOWN_SUBSETS = 8


class Lineage:
    """The artifacts before an artifact.

    Args:
        home: the artifact's directory, beside those of the other artifacts of its root.
        link_from: the folder of the page, for links to pages that are on this machine; None: the page is in `home`,
            and links the pages of all artifacts, so that its bytes do not depend on the root's place.

    Attributes:
        before: the artifacts, the nearest first -> their manifests; None if they are not in this root.
    """

    def __init__(self, home: StorePath, manifest: Manifest, link_from: Path | None = None) -> None:
        self._artifacts, self._manifest, self._link_from = home.parent.parent, manifest, link_from
        self.before: dict[Parent, Manifest | None] = {}
        waiting = deque(_in_order(manifest))
        while waiting:
            parent = waiting.popleft()
            if not _is_artifact(parent) or parent in self.before:
                continue
            self.before[parent] = None
            with contextlib.suppress(InputError):
                self.before[parent] = load_manifest(self._artifacts / parent.name / parent.fingerprint)
                waiting.extend(_in_order(self.before[parent]))

    def facts(self) -> Iterator[tuple[str, list[dict[str, str | None]]]]:
        """Yield the lines of a page's head: name -> entries, each with its `role`, `name`, `link` and `about`."""
        if models := [self._entry(parent, about=_weights(self.before.get(parent))) for parent in self._models()]:
            yield "model", models
        if self._manifest.stage == "convert":
            yield "data", [{"role": "", "name": "", "link": None, "about": _samples(self._manifest)}]
        else:
            samples = ((p, m) for p, m in self.before.items() if m is not None and m.stage == "convert")
            if data := [self._entry(parent, about=_samples(made)) for parent, made in samples]:
                yield "data", data
        parents = self._manifest.parents
        if made_from := [self._entry(parent, role) for role, parent in sorted(parents.items())]:
            yield "made from", made_from
        if earlier := [self._entry(parent) for parent in self.before if parent not in parents.values()]:
            yield "and before", earlier

    def _models(self) -> Iterator[Parent]:
        """Yield the model of the artifact and those that it was made from: an export, its training, its start."""
        manifest: Manifest | None = self._manifest
        while manifest is not None:
            parents = manifest.parents
            way = [parents[role] for role in _TO_MODEL if role in parents]
            if (adapter := parents.get("adapter")) is not None and adapter.name == "export":
                way.insert(0, adapter)
            if not way:
                return
            if way[0].name not in ("answer", "evaluate"):
                yield way[0]
            manifest = self.before.get(way[0])

    def _entry(self, parent: Parent, role: str = "", about: str = "") -> dict[str, str | None]:
        made = self.before.get(parent)
        side = "" if made is None else side_of(made)
        return {
            "role": "" if role == parent.name else role.replace("_", " "),
            "name": f"{parent.name} {parent.fingerprint}",
            "link": self._link(parent),
            "about": ", ".join(filter(None, (side, about))),
        }

    def _link(self, parent: Parent) -> str | None:
        if not _is_artifact(parent):
            return None
        if self._link_from is None:
            return f"../../{parent.name}/{parent.fingerprint}/{REPORT_HTML}"
        page = self._artifacts / parent.name / parent.fingerprint / REPORT_HTML
        return os.path.relpath(page.resolve(), self._link_from.resolve()) if is_local(page) and page.is_file() else None


def side_of(manifest: Manifest) -> str:
    """Return on which side of the training the model of answers or scores is; "" for other artifacts."""
    made_by = {parent.name for parent in manifest.parents.values()}
    if manifest.stage == "answer":
        return "after training" if "export" in made_by else "before training"
    sides = {"made_by": "after training", "start_of": "before training"}
    return next((side for role, side in sides.items() if role in manifest.parents), "")


def _in_order(manifest: Manifest) -> list[Parent]:
    return [parent for _, parent in sorted(manifest.parents.items())]


def _is_artifact(parent: Parent) -> bool:
    return parent.fingerprint != parent.digest  # an input from outside has one digest for both


def _samples(manifest: Manifest) -> str:
    """Return the numbers of samples of a convert artifact, and its subsets."""
    counts = {split: sum(s.num_samples for s in manifest.shards if s.split == split) for split in SPLITS}
    names: Mapping[str, object] = manifest.stats.get("samples", {})
    shown = list(names)[:_SHOWN_SUBSETS]
    more = [f"and {len(names) - len(shown)} more"] if len(names) > len(shown) else []
    subsets = f"; subsets: {', '.join([*shown, *more])}" if names else ""
    return f"{counted(counts['train'], 'sample')} to train on, {counts['heldout']:,} held out{subsets}"


def _weights(manifest: Manifest | None) -> str:
    """Return size and type of the weights of an export artifact; "" for other artifacts."""
    parts = manifest.stats.get("parameters", {}) if manifest is not None and manifest.stage == "export" else {}
    return f"{sum(parts.values()):,} parameters in {manifest.stats.get('dtype')}" if parts else ""
