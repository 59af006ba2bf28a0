"""The page docs/evidence.md, made from the marks of the tests: `python -m tests.tiers.promises` writes it.

`@pytest.mark.promise("...")` on a test, or in `pytestmark` of its module, is a sentence that the test shows. Tests in
several files may carry the same sentence. The marks are read from the text of the files, and nothing is imported. Below
the promises stand the files of measured figures, by their heads.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tiers.plugin import ROOT

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "tests" / "bench" / "results"
# Section -> starts of the paths of its tests, below tests/. The longest start that fits counts, and a promise is in the
# section of most of its tests.
SECTIONS = {
    "Models": ("parity/", "trainer/families/", "trainer/layers/", "e2e/test_families", "equivalence/test_freezing"),
    "Data, tokens and bins": (
        *("dataset_builders/", "stages/", "fuzz/", "trainer/data/", "flows/cli/", "flows/resources/", "e2e/"),
        "equivalence/test_cached_features",
    ),
    "Training and layouts": (
        *("equivalence/", "trainer/", "museum/", "e2e/test_default", "flows/cli/test_vision_table"),
        "stages/test_estimate",
    ),
    "Adapters": (
        *("equivalence/test_adapter", "parity/test_peft", "e2e/test_second_task"),
        *("trainer/checkpoint/test_adapter", "trainer/checkpoint/test_expert", "trainer/layers/test_float8_base"),
        *("trainer/model/test_targets", "stages/answer/test_adapter"),
    ),
    "Checkpoints and failures": (
        *("equivalence/test_checkpoints", "equivalence/test_expert_ranks", "equivalence/test_killed"),
        *("equivalence/test_resharding", "trainer/checkpoint/", "trainer/parallel/", "service/test_operator"),
    ),
    "Evaluation, export and release": (
        *("stages/answer/", "stages/compare/", "stages/contamination/", "stages/evaluate/"),
        *("stages/verify/", "stages/release/", "stages/shared/scoring/", "flows/cli/test_chat"),
        *("e2e/test_never_stops", "e2e/test_receipts"),
    ),
    "Service and infrastructure": ("flows/", "infra/", "service/", "stages/shared/launchers/", "test_"),
}
CORE, FULL, GPU = "in `make test`", "in `make test-full` only", "on GPUs"
TIERS = (CORE, FULL, GPU)
HEAD = """\
# Evidence

`python -m tests.tiers.promises` makes this page from the tests' marks. The numbers after a promise count its tests in
`make test`, in `make test-full` only, and on GPUs; `git grep` finds them by the promise's first words. Bounds hold in
float32 on a CPU where nothing else is said.

Not shown: published weights, since all that was measured are random ones; real files of the_cauldron and CORD; vLLM on
a GPU, and in CI, where a stand-in answers for it; the hub and Kubernetes, for which stand-ins answered; compose.yaml in
Docker; all but the trainer on Python 3.12; whole models with experts on a GPU, but for adapters; `athanor chat` and the
check of exports on a GPU. No CI has a GPU.
"""
_HEAD = re.compile(r"^Card: (.+?)\. Commit: .+\. Weights: .+\.$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Shown:
    """A test that shows a promise.

    Attributes:
        promise: its text.
        path: the test's file, from the root.
        test: the name of the function.
        tier: one of `TIERS`.
    """

    promise: str
    path: str
    test: str
    tier: str


def read_promises(root: Path = ROOT) -> list[Shown]:
    """Return what the tests of a checkout show, file by file."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [shown for path in files for shown in _read(path.read_text(), path.relative_to(root).as_posix())]


def _read(text: str, path: str) -> Iterator[Shown]:
    body = ast.parse(text).body
    assigned = [node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in _names(node)]
    of_module = [mark for value in assigned for mark in (value.elts if isinstance(value, ast.List) else [value])]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = [*of_module, *node.decorator_list]
            for promise in dict.fromkeys(text for mark in marks for text in _promises(mark)):
                yield Shown(promise, path, node.name, _tier(marks))


def _names(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]


def _promises(mark: ast.expr) -> Iterator[str]:
    """Yield the text of a mark, if it is a promise.

    Raises:
        ValueError: the mark holds something other than one literal text.
    """
    if ast.unparse(mark).startswith("pytest.mark.promise"):
        match mark:
            case ast.Call(args=[ast.Constant(value=str(text))], keywords=[]):
                yield text
            case _:
                raise ValueError(f"line {mark.lineno}: a promise is one literal text, not {ast.unparse(mark)}")


def _tier(marks: Iterable[ast.expr]) -> str:
    marks = list(marks)
    if any(ast.unparse(mark).startswith("requires_gpus(") for mark in marks):
        return GPU
    return FULL if any(_is_full(mark) for mark in marks) else CORE


def _is_full(mark: ast.expr) -> bool:
    """Whether a mark moves all of a test out of the core: the mark itself, or parameters that are all `full(...)`."""
    match mark:
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[_, ast.List(elts=values)]):
            return bool(values) and all(ast.unparse(value).startswith("full(") for value in values)
    return ast.unparse(mark) == "pytest.mark.full"


def _section(shown: Iterable[Shown]) -> str:
    found: Counter[str] = Counter()
    for one in shown:
        path = one.path.removeprefix("tests/")
        fitting = [
            (len(start), name) for name, starts in SECTIONS.items() for start in starts if path.startswith(start)
        ]
        found[max(fitting)[1]] += 1
    return max(SECTIONS, key=lambda name: found[name])


def _line(promise: str, shown: list[Shown]) -> str:
    counts = Counter(one.tier for one in shown)
    return f"- {promise} ({'/'.join(str(counts[tier]) for tier in TIERS)})"


def _results() -> Iterator[str]:
    """Yield a line for each set of cards that heads of files of measured figures name, with the names of the files."""
    names: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.md")):
        heads = " ".join(_HEAD.findall(path.read_text()))
        cards = sorted(set(re.findall(r"\bH[12]00\b", heads)))
        names.setdefault(" and ".join(cards) or "no GPU", []).append(f"`{path.name}`")
    yield from (f"- {cards}: {', '.join(names[cards])}" for cards in sorted(names))


def render(shown: list[Shown]) -> str:
    by_promise: dict[str, list[Shown]] = {}
    for one in shown:
        by_promise.setdefault(one.promise, []).append(one)
    sections = {promise: _section(tests) for promise, tests in by_promise.items()}
    lines = [HEAD]
    for name in SECTIONS:
        lines += [f"## {name}\n"]
        lines += [_line(promise, tests) for promise, tests in by_promise.items() if sections[promise] == name]
        lines.append("")
    about = "One file a subject in `tests/bench/results/`, with its commits and commands.\n"
    lines += ["## Measured figures\n", about, *_results()]
    return "\n".join(lines) + "\n"


def main() -> None:
    shown = read_promises()
    PAGE.write_text(render(shown))
    print(f"{PAGE}: {len({one.promise for one in shown})} promises, shown by {len(shown)} marks of tests")


if __name__ == "__main__":
    main()
