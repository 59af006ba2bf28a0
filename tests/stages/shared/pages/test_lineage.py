"""The head of a page: whose answers it shows, of which model and data, with links to the pages before it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dataset_builders.contracts.manifest import Manifest, Parent, ShardEntry
from stages.shared.artifacts.artifact import Artifact
from stages.shared.pages.page import artifact_page
from stages.shared.pages.report import write_report
from tests.helpers.pages import Element, assert_self_contained, parse_page

pytestmark = pytest.mark.promise(
    "The page of an artifact loads nothing, says of which model and data it is, links the pages before it, and tells "
    "each image in words."
)

BASE = Parent(name="hf_dir", fingerprint="b" * 16, digest="b" * 16)  # from outside: no page


@dataclass
class Root:
    """A root in which artifacts are made without their stages."""

    path: Path

    def make(
        self, stage: str, title: str, number: int = 0, parents: dict[str, Parent] | None = None, **fields
    ) -> Parent:
        fingerprint = f"{stage.encode().hex():0<15.15}{number}"
        directory = self.path / "artifacts" / stage / fingerprint
        directory.mkdir(parents=True)
        manifest = Manifest(stage=stage, version=1, fingerprint=fingerprint, config={}, parents=parents or {}, **fields)
        manifest.write(directory)
        write_report(directory, title=title, summary={}, sections=[])
        (directory / "report.html").write_text(artifact_page(directory, manifest))
        return Artifact.load(directory).parent()

    def page(self, made: Parent) -> Path:
        return self.path / "artifacts" / made.name / made.fingerprint / "report.html"

    def head(self, made: Parent) -> dict[str, Element]:
        """Return the lines of the head of a page: name -> content."""
        page = self.page(made).read_text()
        assert_self_contained(page)
        (head,) = parse_page(page).find("dl", "head")
        names, contents = head.find("dt"), head.find("dd")
        return {name.text: content for name, content in zip(names, contents, strict=True)}

    def lines(self, made: Parent) -> dict[str, str]:
        return {name: " ".join(content.text.split()) for name, content in self.head(made).items()}

    def linked(self, made: Parent) -> set[Path]:
        """Return the pages that the head of a page links."""
        links = [link for line in self.head(made).values() for link in line.find("a")]
        return {(self.page(made).parent / link.attributes["href"]).resolve() for link in links}


@pytest.fixture
def made(tmp_path) -> tuple[Root, dict[str, Parent]]:
    root = Root(tmp_path.resolve())
    make = root.make
    shards = [
        ShardEntry(name=f"{split}/shard-00000.tar", split=split, num_samples=number, size_bytes=1, sha256="0" * 64)
        for split, number in (("train", 1263), ("heldout", 534))
    ]
    samples = make("convert", "Samples", shards=shards, stats={"samples": {"pairs": {}, "texts": {}}})
    tokenized = make("tokenize", "Tokenized samples", parents={"samples": samples})
    trained = make("train", "Training", parents={"model": BASE, "tokenized": tokenized})
    stats = {"parameters": {"vision": 3000, "language": 4000}, "dtype": "float32"}
    exported = make("export", "Exported model", parents={"train": trained, "model": BASE}, stats=stats)
    before, after = (
        make("answer", "Answers", number, {"hf": model, "samples": samples})
        for number, model in enumerate((BASE, exported))
    )
    base, tuned = (
        make("evaluate", "Evaluation", number, {"answers": answers, "samples": samples, role: trained})
        for number, (answers, role) in enumerate(((before, "start_of"), (after, "made_by")))
    )
    compared = make("compare", "Before and after training", parents={"base": base, "tuned": tuned, "samples": samples})
    parents = {"export": exported, "train": trained, "evaluate": tuned, "compare": compared, "samples": samples}
    released = make("release", "Release of digits", parents=parents)
    pages = {"samples": samples, "tokenized": tokenized, "trained": trained, "exported": exported, "before": before}
    return root, pages | {"after": after, "base": base, "tuned": tuned, "compared": compared, "released": released}


def test_the_title_says_on_which_side_of_the_training_the_model_is(made):
    root, pages = made
    titles = {name: parse_page(root.page(page).read_text()).find("h1")[0].text for name, page in pages.items()}
    assert titles["base"] == f"Evaluation before training evaluate {pages['base'].fingerprint}"
    assert titles["tuned"] == f"Evaluation after training evaluate {pages['tuned'].fingerprint}"
    assert titles["before"].startswith("Answers before training ")
    assert titles["after"].startswith("Answers after training ")
    assert titles["trained"].startswith("Training train "), "it has no side"


def test_the_head_names_the_model_and_the_data(made):
    root, pages = made
    trained, exported = (f"{pages[name].name} {pages[name].fingerprint}" for name in ("trained", "exported"))
    started = f"hf_dir {'b' * 16}"
    lines = {name: root.lines(page) for name, page in pages.items()}
    model = f"{exported} (7,000 parameters in float32), from {trained}, from {started}"
    assert all(lines[name]["model"] == model for name in ("after", "tuned", "compared", "released"))
    assert all(lines[name]["model"] == started for name in ("before", "base", "trained"))
    data = "1,263 samples to train on, 534 held out; subsets: pairs, texts"
    assert lines["samples"]["data"] == data
    named = f"convert {pages['samples'].fingerprint} ({data})"
    assert all(lines[name]["data"] == named for name in pages if name != "samples")
    base = f"base evaluate {pages['base'].fingerprint} (before training)"
    assert lines["compared"]["made from"].startswith(base)


def test_the_release_links_every_page_and_each_page_those_before_it(made):
    root, pages = made
    places = {name: root.page(page) for name, page in pages.items()}
    assert root.linked(pages["released"]) == {*places.values()} - {places["released"]}
    assert all(page.is_file() for page in root.linked(pages["released"]))
    assert root.linked(pages["tuned"]) == {places[n] for n in ("after", "exported", "trained", "tokenized", "samples")}
    assert root.linked(pages["samples"]) == set()


def test_an_artifact_whose_parents_are_elsewhere_names_them(made, tmp_path):
    root, pages = made
    alone = tmp_path / "else" / "where" / "x"
    shutil.copytree(root.page(pages["tuned"]).parent, alone)
    page = parse_page(artifact_page(alone, Artifact.load(alone).manifest, link_from=tmp_path))
    assert f"answers answer {pages['after'].fingerprint}" in page.text and not page.find("a")
