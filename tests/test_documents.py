"""What the documents name is there: paths in backticks, pictures, links to files and to headings."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_paths_and_links_lead_somewhere(document):
    text = document.read_text()
    paths = set(_PATH.findall(text)) - EXAMPLES
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    for file, heading in _LINK.findall(text):
        target = document.parent / file if file else document
        assert target.exists(), file
        assert not heading or heading in anchors(target), f"{file}#{heading}"


def test_the_documents_are_found():
    names = {path.name for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "DECISIONS.md", "LAYOUTS.md", "SOURCES.md"} <= names
