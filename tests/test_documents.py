"""What the documents name is there: paths in backticks, pictures, links to files and to headings."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "infra/*.md", "stages/**/*.md", "trainer/**/*.md", "dataset_builders/*.md")
    for path in ROOT.glob(pattern)
)
_PATH = re.compile(r"`((?:tests|flows|stages|trainer|dataset_builders|infra)/[\w./-]*?(?:\.\w+|/))`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
EXAMPLES = {"dataset_builders/sources/x.py", "tests/parity/test_NAME.py"}


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_ends(document: Path) -> Iterator[str]:
    text = document.read_text()
    paths = set(_PATH.findall(text)) - EXAMPLES
    yield from (path for path in sorted(paths) if not (ROOT / path).exists())
    for file, heading in _LINK.findall(text):
        target = document.parent / file if file else document
        if not target.exists():
            yield file
        elif heading and heading not in anchors(target):
            yield f"{file}#{heading}"


def test_paths_and_links_lead_somewhere():
    dead = [f"{document.relative_to(ROOT)}: {end}" for document in DOCUMENTS for end in dead_ends(document)]
    assert not dead, "\n" + "\n".join(dead)


def test_the_documents_are_found():
    names = {path.name for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "DECISIONS.md", "LAYOUTS.md", "SOURCES.md"} <= names
