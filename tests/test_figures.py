"""Measured figures: each results file tells where they are from, each bench is in one, and a figure of a document is in
the file that its sentence names.

The convention: a sentence, an item of a list or a row of a table with the figure of a GPU names
`tests/bench/results/<subject>.md`, as a link or in backticks, and each of its numbers stands in that file.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "bench" / "results"
FILES = sorted(RESULTS.glob("*.md"))
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_HEAD = re.compile(r"^Card: (.+?)\. Commit: .+\. Weights: .+\.$", re.MULTILINE)
_NAMED = re.compile(r"tests/bench/results/([\w-]+)\.md")
_DATED = re.compile(r"\b[a-z]\w*_[\w-]*\d{4}-\d\d-\d\d\.(?:md|png)")  # names of files that were there once
_CARD = re.compile(r"\bH[12]00s?\b")
_SPEED = re.compile(r"tokens/s\b|tokens a second|TFLOP/s|\d times (?:transformers|PEFT)")
_NUMBER = re.compile(r"(?<![\w.,:-])\d[\d,]*(?:\.\d+)?(?![\w:-])")
_CODE = re.compile(r"```.*?```", re.DOTALL)
# Ends of sentences: a stop, what may close behind it, a space, and what begins a sentence.
_BETWEEN = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9`*\[(])|\n(?=[-|])")


def test_every_results_file_begins_with_title_and_head():
    """Somewhere is a command, or the commit that still has the bench."""
    assert len(FILES) >= 15
    for path in FILES:
        title, empty, head = path.read_text().split("\n")[:3]
        assert title.startswith("# ") and not empty and _HEAD.fullmatch(head), f"{path.name}: no title and head"
        assert re.search(r"^    \S|git show|`python -m", path.read_text(), re.MULTILINE), f"{path.name}: no command"


def test_every_bench_is_in_a_results_file():
    told = "\n".join(path.read_text() for path in FILES)
    benches = [path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py")]
    missing = [name for name in benches if f"python -m tests.bench.{name}" not in told]
    assert len(benches) > 10 and not missing, f"no results file has the command of {missing}"


def test_every_results_file_that_is_named_is_there():
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0") if name.endswith((".md", ".py", ".sh", ".yaml", ".txt")))
    texts = {path.relative_to(ROOT): path.read_text() for path in paths if path.is_file()}
    named = [(path, match[0]) for path, text in texts.items() for match in _NAMED.finditer(text)]
    gone = [f"{path}: {name}" for path, name in named if not (ROOT / name).is_file()]
    gone += [f"{path}: {match[0]}" for path, text in texts.items() for match in _DATED.finditer(text)]
    assert len(named) > 30 and not gone, "\n" + "\n".join(gone)


def sentences(text: str) -> Iterator[str]:
    """Yield sentences, items of lists and rows of tables, without code blocks."""
    for block in re.split(r"\n\s*\n", _CODE.sub("", text)):
        yield from (" ".join(part.split()) for part in _BETWEEN.split(block))


def numbers(sentence: str) -> list[str]:
    """Return the numbers of a sentence, without those in names of files, commands and models."""
    bare = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", sentence)
    return [found.rstrip(",") for found in _NUMBER.findall(_CARD.sub(" ", bare))]


def faults(sentence: str) -> Iterator[str]:
    """Yield the reason for which a sentence breaks the convention."""
    names = {match[1] for match in _NAMED.finditer(sentence)}
    is_figure = bool(_CARD.search(sentence) or _SPEED.search(sentence))
    if is_figure and numbers(sentence) and not names:
        yield "a figure of a GPU without its results file"
    told = "\n".join(path.read_text() for path in FILES if path.stem in names)
    for number in numbers(sentence) if names else ():
        if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", told):
            yield f"{number} is not in {', '.join(sorted(names))}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_a_figure_of_a_document_is_that_of_the_results_file_beside_it(document):
    found = [(sentence, fault) for sentence in sentences(document.read_text()) for fault in faults(sentence)]
    assert not found, "\n" + "\n".join(f"{fault}: {sentence}" for sentence, fault in found)


def test_the_convention_can_be_broken():
    file = "`tests/bench/results/easy_vqa.md`"
    assert list(faults(f"It took 347 s on an H200 ({file}).")) == []
    assert list(faults("It took 347 s on an H200.")) == ["a figure of a GPU without its results file"]
    assert list(faults("Some 9,000 tokens/s.")) == ["a figure of a GPU without its results file"]
    assert list(faults(f"It took 346 s on an H200 ({file}).")) == ["346 is not in easy_vqa"]
    assert list(sentences("It is 1.5. Then\n2.\n\n- one\n- two")) == ["It is 1.5.", "Then 2.", "- one", "- two"]


def test_the_readme_says_random_weights_beside_each_speed():
    speeds = [sentence for sentence in sentences((ROOT / "README.md").read_text()) if _SPEED.search(sentence)]
    assert speeds and [sentence for sentence in speeds if "random weights" not in sentence] == []
