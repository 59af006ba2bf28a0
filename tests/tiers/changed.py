"""Run the tests that a change can reach: `make test-changed`.

    python -m tests.tiers.changed [--since COMMIT] [--budget SECONDS] [--workers N] [pytest's arguments]

A change reaches a test file if the file imports a changed module, directly or through others. A module's name in a
string counts as an import: registries, `python -m` and patches name modules so. `PATHS` says it for files that imports
do not show. A change of anything else takes all tests.
"""

import argparse
import ast
import functools
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.tiers.passed import ROOT, git, read_full_pass
from tests.tiers.plugin import read_durations

PACKAGES = ("flows", "stages", "dataset_builders", "trainer", "tests")
# These tests start the product by its command, so every module of it reaches them.
WHOLE = ("tests/e2e/", "tests/service/")
# These tests start the trainer through a stage, which names it only by the word "trainer", as many files do.
TRAINER = ("tests/stages/train/", "tests/stages/encode_images/", "tests/stages/export/")
# Pattern of a changed file -> start of the test files that it reaches. The first pattern that fits counts.
PATHS = {
    "tests/bench/results/*": ("tests/test_documents.py",),
    "tests/gpu/*": ("tests/infra/test_scripts.py", "tests/test_documents.py"),
    "tests/golden/*": ("tests/stages/scoring/", "tests/dataset_builders/", "tests/parity/", "tests/e2e/"),
    "tests/durations.json": (),
    "tests/full_pass.json": (),
    "tests/breaks/*.patch": ("tests/test_tiers.py",),
    "docs/pictures/layouts/*": ("tests/trainer/parallel/test_draw_layouts.py", "tests/test_documents.py"),
    "docs/pictures/*": ("tests/test_documents.py",),
    "docs/style/*": ("tests/test_documents.py",),
    "docs/layouts.md": ("tests/trainer/parallel/test_draw_layouts.py", "tests/test_documents.py"),
    "mkdocs.yml": ("tests/test_documents.py",),
    "*.md": ("tests/test_documents.py", "tests/test_document_commands.py", "tests/museum/test_table.py"),
    "LICENSE": (),
    "infra/*": ("tests/infra/", "tests/service/", "tests/test_documents.py"),
    "flows/recipes/*": (
        *("tests/flows/", "tests/e2e/", "tests/service/"),
        *("tests/test_documents.py", "tests/test_document_commands.py"),
    ),
    "stages/pages/templates/*": ("tests/stages/", "tests/e2e/", "tests/test_security.py"),
    "stages/launchers/*": ("tests/stages/launchers/", "tests/service/test_slurm.py"),
}
_MODULE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+(:\w+)?")


@functools.cache
def modules() -> dict[str, Path]:
    """Return name of each module of the checkout -> its path from the root."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.relative_to(ROOT)
    return found


def imported_by(text: str, known: Iterable[str]) -> set[str]:
    """Return the known modules that a file's text names, with the packages that contain them."""
    known, named = set(known), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= set(_modules_in(node.value, known))
    return {".".join(name.split(".")[:length]) for name in named for length in range(1, name.count(".") + 2)} & known


def _modules_in(text: str, known: set[str]) -> Iterator[str]:
    for match in _MODULE.finditer(text) if len(text) < 400 else ():
        yield match.group().partition(":")[0]


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return module -> the modules that it imports."""
    known = modules()
    return {name: imported_by((ROOT / path).read_text(), known) - {name} for name, path in known.items()}


def reached(changed: set[str]) -> dict[str, str]:
    """Return module that imports one of `changed`, directly or indirectly -> the module through which it does so."""
    users: dict[str, set[str]] = {}
    for name, used in imports().items():
        for other in used:
            users.setdefault(other, set()).add(name)
    found, waiting = {name: name for name in changed}, list(changed)
    while waiting:
        name = waiting.pop()
        for user in users.get(name, ()):
            if user not in found:
                found[user] = name
                waiting.append(user)
    return found


def tests_for(paths: Iterable[str]) -> dict[str, str]:
    """Return test file -> the reason why it is taken, for the paths that a change touches."""
    tests = sorted(str(path) for path in modules().values() if path.name.startswith("test_"))
    by_path = {str(path): name for name, path in modules().items()}
    taken: dict[str, str] = {}
    changed_modules: set[str] = set()
    for path in paths:
        if path in by_path:
            changed_modules.add(by_path[path])
            if path.endswith("/conftest.py"):  # pytest loads it, and no test imports it
                taken |= {test: path for test in tests if test.startswith(path.removesuffix("conftest.py"))}
            if not path.startswith("tests/"):
                starts = WHOLE + TRAINER if path.startswith("trainer/") else WHOLE
                taken |= {test: f"starts a process that runs {path}" for test in tests if test.startswith(starts)}
            continue
        starts = next((starts for pattern, starts in PATHS.items() if fnmatch(path, pattern)), ("tests/",))
        taken |= {test: path for test in tests if test.startswith(starts)}
    for name, through in reached(changed_modules).items():
        test = str(modules()[name])
        if test in tests:
            taken.setdefault(test, "changed" if name == through else f"imports {through}")
    # These tests read the text of every file.
    always = [f"tests/test_{name}.py" for name in ("architecture", "security", "documents", "tiers")]
    taken |= {test: "looks at every file" for test in always if test in tests and taken}
    return taken


def changed_paths(since: str) -> list[str]:
    """Return the paths that differ from a commit: committed, uncommitted, new or deleted. Return all paths if git does
    not have the commit."""
    if subprocess.run(("git", "cat-file", "-e", f"{since}^{{commit}}"), cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        print(f"this clone does not have commit {since[:10]}: taking all tests")
        return git("ls-files").splitlines()
    differing = git("diff", "--name-only", "--no-renames", since).splitlines()
    return sorted({*differing, *git("ls-files", "--others", "--exclude-standard").splitlines()})


def main(argv: list[str]) -> int:
    """Print which test files are taken and why, and run them, the longest first."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.changed")
    parser.add_argument("--since", help="a commit; default: the newest of which all tests passed")
    parser.add_argument("--budget", type=float, help="seconds; a file that would end later, by its record, is skipped")
    parser.add_argument("--workers", type=int, default=1, help="processes; files of tests/service/ run one by one")
    args, rest = parser.parse_known_args(argv)
    began = time.monotonic()
    since = args.since or read_full_pass()
    paths = changed_paths(since)
    taken = tests_for(paths)
    print(f"{len(paths)} files differ from {since[:10]}; they reach {len(taken)} of the test files:")
    seconds = read_durations()
    for test in sorted(taken, key=lambda test: -seconds.get(test, {}).get("full", 0.0)):
        print(f"  {seconds.get(test, {}).get('full', 0.0):6.0f} s  {test}: {taken[test]}")
    service = {test for test in taken if test.startswith("tests/service/")}
    spread = [f"--numprocesses={args.workers}", "--dist=loadfile", "--no-loadscope-reorder"] if args.workers > 1 else []
    codes = []
    for tests, options in ((set(taken) - service, spread), (service, ["-p", "no:xdist"])):
        budget = [] if args.budget is None else [f"--budget={max(0.0, args.budget - time.monotonic() + began)}"]
        command = [sys.executable, "-m", "pytest", *options, *budget, *rest, *sorted(tests)]
        codes += [subprocess.run(command, cwd=ROOT, check=False).returncode] if tests else []
    return max((code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
