"""The table of the museum, made from the docstrings of its tests: `python -m tests.museum.table` prints it.

An exhibit is a test function of a module `test_*.py` of this folder. Its docstring is one sentence that tells the
published fault, an empty line, and the addresses of its reports. The test shows that athanor does not have the fault
and, below `with fault_seen():`, that its check fails when the fault is put in. Where one check sees several faults,
each is a `Fault` in a dictionary, which the test takes as its parameter `fault`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_REPORT = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)/(?:pull|issues)/(\d+)")


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A published fault.

    Attributes:
        theme: first sentence of its module's docstring.
        told: the fault in one sentence.
        reports: (owner/name, number, address) of each report.
        shows_fault: whether the test puts the fault in.
    """

    file: str
    name: str
    theme: str
    told: str
    reports: tuple[tuple[str, str, str], ...]
    shows_fault: bool


def read_exhibits() -> list[Exhibit]:
    """Return all exhibits, in the order of their files and lines."""
    return [exhibit for path in sorted(FOLDER.glob("test_*.py")) for exhibit in _read(path)]


def _read(path: Path) -> Iterator[Exhibit]:
    tree = ast.parse(path.read_text())
    theme = ast.get_docstring(tree).partition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, call in zip(node.value.keys, node.value.values):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "Fault":
                    told, reports = map(ast.literal_eval, call.args[:2])
                    yield Exhibit(path.name, ast.literal_eval(name), theme, told, _reports(reports), True)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and path.name != "test_table.py":
            shows_fault = "with fault_seen():" in ast.unparse(node)
            told, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
            if not shows_fault or "fault" not in [argument.arg for argument in node.args.args]:
                yield Exhibit(path.name, node.name, theme, " ".join(told.split()), _reports(rest), shows_fault)


def _reports(text: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"{m[1]}/{m[2]}", m[3], m[0]) for m in _REPORT.finditer(text))


def render(exhibits: list[Exhibit]) -> str:
    """Return the table, theme by theme."""
    lines, theme = [], ""
    for exhibit in exhibits:
        if exhibit.theme != theme:
            lines += [""] if theme else []
            theme = exhibit.theme
            lines += [f"## {theme}\n", "| the fault | reported as | test |", "| --- | --- | --- |"]
        reports = ", ".join(f"[{repository}#{number}]({address})" for repository, number, address in exhibit.reports)
        lines.append(f"| {exhibit.told} | {reports} | `{exhibit.name}` |")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(render(read_exhibits()), end="")
