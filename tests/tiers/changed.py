"""Run the tests that a change can reach: `make test-changed`.

    python -m tests.tiers.changed [--since COMMIT] [--budget SECONDS] [--workers N] [pytest's arguments]

A budget takes the tests of the full tier alone, of the files that are nearest to the change by their imports, as long
as their recorded processor seconds fit.

A change reaches a test file if the file imports a changed module, directly or through others. A module's name in a
string counts as an import: registries, `python -m` and patches name modules so. `PATHS` says it for files that imports
do not show. A change of anything else takes all tests.
"""

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.tiers.plugin import ROOT, read_durations

FULL_PASS = ROOT / "tests" / "full_pass.json"
UNKNOWN_SECONDS = 30.0  # of a file without a record
PACKAGES = ("flows", "stages", "dataset_builders", "trainer", "tests")
# These tests start the product by its command, so every module of it reaches them.
WHOLE = ("tests/e2e/", "tests/service/")
# These tests start the trainer through a stage, which names it only by the word "trainer", as many files do.
TRAINER = ("tests/stages/train/", "tests/stages/encode_images/", "tests/stages/export/")
# Pattern of a changed file -> start of the test files that it reaches. The first pattern that fits counts.
PATHS = {
    "tests/bench/results/*": ("tests/test_figures.py", "tests/test_tiers.py", "tests/infra/test_gpu_environment.py"),
    "tests/gpu/*": ("tests/infra/test_scripts.py", "tests/test_documents.py"),
    "tests/golden/*": ("tests/stages/shared/scoring/", "tests/dataset_builders/", "tests/parity/", "tests/e2e/"),
    "tests/durations.json": (),
    "tests/full_pass.json": (),
    "tests/breaks/*.patch": ("tests/test_tiers.py",),
    "docs/pictures/layouts/*": ("tests/trainer/parallel/test_draw_layouts.py", "tests/test_documents.py"),
    "docs/pictures/*": ("tests/test_documents.py",),
    "docs/style/*": ("tests/test_documents.py",),
    "docs/layouts.md": ("tests/trainer/parallel/test_draw_layouts.py", "tests/test_documents.py"),
    "mkdocs.yml": ("tests/test_documents.py",),
    "*.md": (
        *("tests/test_documents.py", "tests/test_document_commands.py", "tests/test_figures.py"),
        "tests/flows/cli/init/test_what_fits.py",
    ),
    "LICENSE": (),
    "infra/*": ("tests/infra/", "tests/service/", "tests/test_documents.py"),
    "flows/recipes/*": (
        *("tests/flows/", "tests/e2e/", "tests/service/"),
        *("tests/test_documents.py", "tests/test_document_commands.py"),
    ),
    "stages/shared/pages/templates/*": ("tests/stages/", "tests/e2e/", "tests/test_security.py"),
    "stages/shared/launchers/*": ("tests/stages/shared/launchers/", "tests/service/test_slurm.py"),
}
_HAS_FULL = re.compile(r"mark\.full|\bfull\(|\btiered\(")
_MODULE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+(:\w+)?")


def git(*arguments: str) -> str:
    """Return the output of a git command.

    Raises:
        subprocess.CalledProcessError: git failed, or this is not a checkout.
    """
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def read_full_pass() -> str:
    """Return the newest commit at which all tests passed."""
    return json.loads(FULL_PASS.read_text())["commit"]


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
    known = modules()
    return {name: imported_by((ROOT / path).read_text(), known) - {name} for name, path in known.items()}


def reached(changed: set[str]) -> dict[str, str]:
    """Return module that imports one of `changed`, directly or indirectly -> the module through which it does so; the
    nearest first."""
    users: dict[str, set[str]] = {}
    for name, used in imports().items():
        for other in used:
            users.setdefault(other, set()).add(name)
    found, waiting = {name: name for name in sorted(changed)}, deque(sorted(changed))
    while waiting:
        name = waiting.popleft()
        for user in sorted(users.get(name, ())):
            if user not in found:
                found[user] = name
                waiting.append(user)
    return found


def tests_for(paths: Iterable[str]) -> dict[str, str]:
    """Return test file -> the reason why it is taken, for the paths that a change touches; the nearest to it first."""
    tests = sorted(str(path) for path in modules().values() if path.name.startswith("test_"))
    by_path = {str(path): name for name, path in modules().items()}
    by_start: dict[str, str] = {}
    changed_modules: set[str] = set()
    for path in paths:
        if path in by_path:
            changed_modules.add(by_path[path])
            if path.endswith("/conftest.py"):  # pytest loads it, and no test imports it
                by_start |= {test: path for test in tests if test.startswith(path.removesuffix("conftest.py"))}
            if not path.startswith("tests/"):
                starts = WHOLE + TRAINER if path.startswith("trainer/") else WHOLE
                by_start |= {test: f"starts a process that runs {path}" for test in tests if test.startswith(starts)}
            continue
        starts = next((starts for pattern, starts in PATHS.items() if fnmatch(path, pattern)), ("tests/",))
        by_start |= {test: path for test in tests if test.startswith(starts)}
    through = {str(modules()[name]): by for name, by in reached(changed_modules).items()}
    named = {str(modules()[name]) for name in changed_modules}
    taken = {t: "changed" if t in named else f"imports {by}" for t, by in through.items() if t in tests}
    taken |= {test: reason for test, reason in by_start.items() if test not in taken}
    # These tests read the text of every file.
    always = [f"tests/test_{name}.py" for name in ("architecture", "security", "documents", "tiers")]
    return taken | {test: "looks at every file" for test in always if test in tests and taken and test not in taken}


def within(budget: float, tests: Iterable[str]) -> dict[str, float]:
    """Return the files, in their order, whose tests of the full tier alone fit into a number of processor seconds ->
    their recorded seconds."""
    chosen: dict[str, float] = {}
    recorded = read_durations()
    for test in tests:
        if not _HAS_FULL.search((ROOT / test).read_text()):
            continue
        tiers = recorded.get(test, {})
        seconds = max(0.0, tiers["full"] - tiers.get("core", 0.0)) if "full" in tiers else UNKNOWN_SECONDS
        if sum(chosen.values()) + seconds <= budget:
            chosen[test] = seconds
    return chosen


def changed_paths(since: str) -> list[str]:
    """Return the paths that differ from a commit: committed, uncommitted, new or deleted. Return all paths if git does
    not have the commit."""
    if subprocess.run(("git", "cat-file", "-e", f"{since}^{{commit}}"), cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        print(f"this clone does not have commit {since[:10]}: taking all tests")
        return git("ls-files").splitlines()
    differing = git("diff", "--name-only", "--no-renames", since).splitlines()
    return sorted({*differing, *git("ls-files", "--others", "--exclude-standard").splitlines()})


def run_files(files: list[str], workers: int, arguments: list[str]) -> int:
    """Run pytest on files, and return its exit code.

    tests/service/ runs after the rest in two processes: its tests wait for servers, and more of them would starve each
    other.
    """
    codes = []
    service = [file for file in files if file.startswith("tests/service/")]
    for chosen, processes in (([file for file in files if file not in service], workers), (service, min(2, workers))):
        spread = [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", "pytest", *spread, *arguments, *chosen]
        codes += [subprocess.run(command, cwd=ROOT, check=False).returncode] if chosen else []
    # a pytest that a signal ended has a negative code
    return next((code for code in codes if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)), 0)


def main(argv: list[str]) -> int:
    """Print which test files are taken and why, and run them."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.changed")
    parser.add_argument("--since", help="a commit; default: the newest of which all tests passed")
    parser.add_argument("--budget", type=float, help="recorded processor seconds of the tests of the full tier alone")
    parser.add_argument("--workers", type=int, default=1, help="processes; two at most for tests/service/")
    args, rest = parser.parse_known_args(argv)
    since = args.since or read_full_pass()
    paths = changed_paths(since)
    taken = tests_for(paths)
    print(f"{len(paths)} files differ from {since[:10]}; they reach {len(taken)} of the test files")
    if args.budget is None:
        chosen = {test: read_durations().get(test, {}).get("full", 0.0) for test in taken}
    else:
        chosen, rest = within(args.budget, taken), ["-m", "full", *rest]
        print(f"{len(chosen)} of them have tests of the full tier that fit into {args.budget:.0f} processor seconds:")
    for test, seconds in chosen.items():
        print(f"  {seconds:6.0f} s  {test}: {taken[test]}")
    return run_files(sorted(chosen), args.workers, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
