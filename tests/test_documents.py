"""Everything that the documents name exists: paths in backticks, images, links to files and to headings, targets of
make, error messages, and tests. The README is short, and the site builds and calls no other server."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.document_tables import PAGES, table_names, with_tables

pytestmark = pytest.mark.full  # `make lint` runs them always

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in (
        *("*.md", "tests/*.md", "tests/museum/*.md", "infra/*.md"),
        *("stages/**/*.md", "trainer/**/*.md", "docs/**/*.md"),
    )
    for path in ROOT.glob(pattern)
)
GUIDES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))  # documents for users
_PATH = re.compile(r"`((?:tests|flows|stages|trainer|dataset_builders|infra)/[\w./-]*?(?:\.\w+|/))`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
_TEST = re.compile(r"`(?:tests/[\w/]*/)?(test_\w+)(?:\.py)?`")
EXAMPLES = {"dataset_builders/sources/x.py", "tests/parity/test_NAME.py"}


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
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
    names = {path.name for path in DOCUMENTS} | {f"{path.parent.name}/{path.name}" for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "decisions/scores.md", "layouts.md", "data-formats.md"} <= names


def named_tests(document: Path) -> Iterator[str]:
    """Yield names of tests, and of their files without .py."""
    yield from (name for name in _TEST.findall(document.read_text()) if f"tests/parity/{name}.py" not in EXAMPLES)


def test_every_test_that_a_document_names_exists():
    files = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in files}
    known |= {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = [(document, name) for document in DOCUMENTS for name in named_tests(document)]
    wrong = [f"{document.relative_to(ROOT)}: {name} is no test" for document, name in named if name not in known]
    assert len(named) > 15 and not wrong, "\n" + "\n".join(wrong)


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_every_decision_has_a_date_and_at_most_twelve_lines():
    """Each line has at most 120 characters. Empty lines do not count."""
    date = re.compile(r"\*\d{4}-\d\d-\d\d(, \d{4}-\d\d-\d\d)*\*")
    wrong, count = [], 0
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        for entry in path.read_text().split("\n## ")[1:]:
            heading, *rest = (line for line in entry.splitlines() if line.strip())
            dated, lines = rest[:1], rest[1:]
            is_dated = bool(dated) and date.fullmatch(dated[0]) is not None
            count += 1
            if not is_dated or not 1 <= len(lines) <= 12 or max(map(len, [heading, *lines])) > 120:
                wrong.append(f"{path.name}: {heading}: {len(lines)} lines")
    assert count > 50 and not wrong, "\n" + "\n".join(wrong)


def test_every_name_of_the_walk_exists():
    rows = re.findall(r"^\| .* \| `(\S+\.py)` \| `([\w.]+)` \|$", (ROOT / "docs" / "walk.md").read_text(), re.MULTILINE)
    missing = []
    for file, dotted in rows:
        body = ast.parse((ROOT / file).read_text()).body
        for name in dotted.split("."):
            found = [node for node in body if getattr(node, "name", None) == name]
            body = found[0].body if found else []
            missing += [] if found else [f"{file}: {dotted}"]
    assert len(rows) > 30 and not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_what_the_code_says(page):
    text = page.read_text()
    assert text == with_tables(text), "run `python -m tests.helpers.document_tables`"


def test_every_table_that_the_code_makes_is_in_one_page():
    found = [name for page in PAGES for name in re.findall(r"^<!-- table: (.+) -->$", page.read_text(), re.MULTILINE)]
    assert sorted(found) == sorted(table_names())


def test_every_target_of_make_that_a_document_names_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for path in GUIDES for name in re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), re.MULTILINE)}
    assert named - targets == set() and {"run", "test", "gpu", "docs"} <= named


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Return the strings of a module. A zero byte replaces each value in an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_message_of_the_page_of_troubles_is_in_the_code():
    """Check the fixed words of each message, between its `<...>`. Short ones between two values prove nothing."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [quoted.strip("` ") for quoted in re.findall(r"^- (`.+`)$", page, re.MULTILINE)]
    folders = ("flows", "stages", "dataset_builders", "trainer", "infra")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(text for path in modules for text in texts_of(ast.parse(path.read_text())))
    code += "\n should be less than or equal to "  # messages of pydantic, reworded by flows/pipeline/recipe.py
    gone = []
    for message in messages:
        pieces = re.split(r"<[\w ]+>", message)
        assert max(map(len, pieces)) >= 8, f"nothing of {message!r} can be looked for"
        gone += [f"{piece!r} of {message!r}" for piece in pieces if len(piece) >= 6 and piece not in code]
    assert len(messages) >= 8 and not gone, "\n" + "\n".join(gone)


def test_the_site_builds_and_asks_no_other_server(tmp_path):
    """Broken links and missing headings stop the build. Links for a reader to follow may lead anywhere."""
    config = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(config.replace("site_dir: build/site", "site_dir: site"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = (sys.executable, "-m", "zensical", "build", "--strict")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site, docs = tmp_path / "site", ROOT / "docs"
    pages = {path.relative_to(site).with_suffix(""): path.read_text() for path in site.rglob("*.html")}
    assert pages.keys() >= {path.relative_to(docs).with_suffix("") for path in docs.rglob("*.md")}
    address = r"\"?(?:https?:)?//[^>]*"
    loaded = re.compile(rf"<(?:script|img|iframe)[^>]*src={address}|<link(?![^>]*canonical)[^>]*href={address}")
    assert {name: found for name, page in pages.items() if (found := loaded.findall(page))} == {}
    styles = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.css"))
    assert styles and not re.findall(rf"url\({address}|@import", styles)
