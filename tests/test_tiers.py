"""The tiers of the suite: which tests a change takes, which files became slow, and whether the breaks still apply."""

import ast
import functools
import gc
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.breaks.__main__ import FOLDER, read_breaks
from tests.tiers import changed, full
from tests.tiers.plugin import ROOT, Tiers, passed_in, read_ledger, slower_than_recorded
from tests.tiers.processor import processor_seconds
from tests.tiers.promises import CORE, FULL, GPU, PAGE, SECTIONS, read_promises, render

# Patterns of `PATHS` without a file: `make test-full` writes the first two, and the third is for a future file.
MAY_BE_MISSING = ("tests/durations.json", "tests/full_pass.json")

TREE = {
    "stages/__init__.py": "",
    "stages/first.py": "",
    "stages/second.py": "from stages import first",
    "stages/other.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/test_direct.py": "from stages.first import f",
    "tests/test_behind.py": "import stages.second",
    "tests/test_named.py": "TARGET = 'stages.second:run'",
    "tests/test_unrelated.py": "import stages.other",
    "tests/below/__init__.py": "",
    "tests/below/conftest.py": "",
    "tests/below/test_deep.py": "",
}
TESTS = {path for path in TREE if "test_" in path}


def clear_caches() -> None:
    changed.modules.cache_clear()
    changed.imports.cache_clear()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make a checkout of a few modules and tests."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    clear_caches()
    yield tmp_path
    clear_caches()


DEEP = {"tests/below/test_deep.py"}
UNKNOWN = ["pyproject.toml", "stages/deleted.py", ".ci/run", "stages/new/table.csv"]


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        pytest.param("stages/__init__.py", TESTS - DEEP, id="a package is imported with its modules"),
        pytest.param("tests/below/conftest.py", DEEP, id="a conftest reaches its folder"),
        pytest.param("tests/conftest.py", TESTS, id="and the folders below"),
        *(pytest.param(path, TESTS, id=f"nobody knows {path}") for path in UNKNOWN),
    ],
)
def test_a_change_takes_the_tests_that_it_can_reach(tree, path, taken):
    assert changed.tests_for([path]).keys() == taken


def test_the_table_of_paths_names_what_is_there():
    """A pattern without a file, or a start without a test file, is left over from a renamed folder."""
    files = subprocess.run(("git", "ls-files"), cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    tests = [str(path) for path in changed.modules().values() if path.name.startswith("test_")]
    patterns = [pattern for pattern in changed.PATHS if pattern not in MAY_BE_MISSING]
    without_file = [pattern for pattern in patterns if not any(fnmatch(file, pattern) for file in files)]
    starts = {start for starts in (changed.WHOLE, changed.TRAINER, *changed.PATHS.values()) for start in starts}
    without_test = [start for start in starts if not any(test.startswith(start) for test in tests)]
    assert (without_file, without_test) == ([], [])


def test_every_break_applies_and_names_tests_that_are_there():
    offenders = []
    breaks = read_breaks()
    for broken in breaks:
        check = ("git", "apply", "--check", str(broken.path))
        applied = subprocess.run(check, cwd=ROOT, check=False, capture_output=True, text=True)
        if applied.returncode:
            offenders.append(f"{broken.path.name}: {applied.stderr.strip()}")
        files = [ROOT / argument for argument in broken.seen_by if argument.endswith(".py")]
        texts = [file.read_text() for file in files if file.is_file()]
        if len(texts) < max(1, len(files)):
            offenders.append(f"{broken.path.name}: {' '.join(broken.seen_by)} names no test file, or one that is gone")
        words = set(" ".join(broken.seen_by).partition("-k ")[2].split()) - {"and", "or", "not"}
        lost = [word for word in words if not any(word.strip("()") in text for text in texts)]
        offenders += [f"{broken.path.name}: no test is named {word}" for word in lost]
    assert offenders == []
    assert len(breaks) >= 30 and all(path.suffix in (".py", ".patch") for path in FOLDER.iterdir() if path.is_file())


def test_a_slow_file_is_told_by_the_speed_of_the_machine():
    recorded = {"a": 100.0, "b": 100.0, "c": 100.0, "short": 1.0, "unknown": 0.0}
    on_a_slow_machine = {"a": 300.0, "b": 300.0, "c": 300.0, "short": 3.0, "unknown": 900.0, "new": 900.0}
    assert slower_than_recorded(on_a_slow_machine, recorded) == []
    # `short` takes twice its record, but less than the seconds that count.
    grown = on_a_slow_machine | {"b": 900.0, "short": 9.5}
    (line,) = slower_than_recorded(grown, recorded)
    assert line.startswith("slower than recorded: b: 900 s, expected 50")
    assert slower_than_recorded({"new": 5.0}, recorded) == []


def test_a_budget_takes_the_nearest_files_whose_tests_of_the_full_tier_fit(tree, monkeypatch):
    for test in TESTS:
        (tree / test).write_text("import pytest\n@pytest.mark.full\n")
    (tree / "tests/test_named.py").write_text("")  # has core tests alone
    recorded = {test: {"core": 100.0, "full": 140.0} for test in TESTS} | {"tests/test_direct.py": {"full": 200.0}}
    monkeypatch.setattr(changed, "read_durations", lambda: recorded)
    nearest = ["tests/test_direct.py", "tests/test_named.py", "tests/test_behind.py", "tests/test_unrelated.py"]
    assert changed.within(245.0, nearest) == {"tests/test_direct.py": 200.0, "tests/test_behind.py": 40.0}


def test_a_changed_module_takes_the_tests_that_import_it_the_nearest_first(tree):
    taken = changed.tests_for(["stages/first.py"])
    assert [*taken] == ["tests/test_direct.py", "tests/test_behind.py", "tests/test_named.py"]
    assert taken["tests/test_behind.py"] == "imports stages.second"


SUITE = """
import pytest, subprocess, sys
@pytest.mark.parametrize("number", range(3))
def test_it(number):
    subprocess.run([sys.executable, "-c", "import time; [0 for _ in iter(lambda: time.process_time() < 0.2, False)]"])
def test_skips(): pytest.skip("no GPU")
def test_fails(): assert {passes}
"""


@pytest.mark.full
def test_a_part_is_resumed_where_it_stopped_and_a_pass_tells_what_it_rests_on(tmp_path, monkeypatch):
    """Also with several processes. The seconds of a program that a test starts are the test's."""
    suite, ledger, rows = tmp_path / "test_it.py", tmp_path / "ledger.jsonl", []
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for passes in (False, True):
        suite.write_text(SUITE.replace("{passes}", str(passes)))
        assert full.run_part("1/1", ["test_it.py"], ledger, 2, ["-p", "tests.tiers.plugin"]) is passes
        assert (full.joined(read_ledger(ledger), {"test_it.py"}) is not None) is passes
        rows.append([row["test"] for row in read_ledger(ledger) if "test" in row])
    assert len(rows[0]) == 5 and rows[1][5:] == ["test_it.py::test_fails"]
    assert passed_in(ledger) == {*rows[0]}
    whole = full.joined(read_ledger(ledger), {"test_it.py"})
    assert (whole["passed"], whole["skipped"]) == (4, {"no GPU": 1})
    assert whole["failed_before_they_passed"] == ["test_it.py::test_fails"]
    assert all(row["seconds"] > 0.1 for row in read_ledger(ledger) if "[" in row.get("test", ""))
    assert full.joined(read_ledger(ledger), {"test_it.py", "test_other.py"}) is None


def test_a_later_commit_takes_over_what_its_difference_cannot_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(full, "changed_paths", lambda commit: [f"since {commit}"])
    monkeypatch.setattr(full, "tests_for", lambda paths: {"tests/test_a.py": paths[0]})
    row = {"outcome": "passed", "why": "", "seconds": 1.0}
    rows = [{"test": f"tests/test_{name}.py::test", **row} for name in "ab"]
    part = {"part": "1/1", "machine": "2 cores", "clock_seconds": 3, "passed": True}
    rows += [{**part, "files": ["tests/test_a.py", "tests/test_b.py"]}]
    before, now = tmp_path / f"{'1' * 40}.jsonl", tmp_path / f"{'2' * 40}.jsonl"
    before.write_text("".join(json.dumps(row) + "\n" for row in rows))
    full.take_over(now)
    assert read_ledger(now) == [{"commit": "1" * 40, **rows[1]}, {**rows[2], "files": ["tests/test_b.py"]}]
    assert full.ended(read_ledger(now)) == {"tests/test_b.py"}
    assert full.joined(read_ledger(now), {"tests/test_a.py", "tests/test_b.py"}) is None
    assert full.joined(read_ledger(now), {"tests/test_b.py"})["taken_over"] == {"1" * 40: 1}


@pytest.mark.parametrize(("codes", "wanted"), [([0, 5], 0), ([0, -9], -9), ([1, 0], 1), ([5, 5], 0)], ids=str)
def test_files_whose_pytest_was_killed_have_not_passed(monkeypatch, codes, wanted):
    ends = iter(codes)
    monkeypatch.setattr(changed.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=next(ends)))
    assert changed.run_files(["tests/test_a.py", "tests/service/test_b.py"], 3, []) == wanted


def test_parts_have_about_the_same_seconds():
    seconds = {f"{number:02d}": float(number) for number in range(30)}
    divided = full.divide(seconds, 6)
    sums = [sum(seconds[file] for file in part) for part in divided]
    assert sorted(file for part in divided for file in part) == sorted(seconds) and max(sums) - min(sums) <= 5


def test_imports_leave_garbage_collection_again_after_a_test_that_trains():
    gc.unfreeze()  # as the loop of a training does at its end
    assert gc.get_freeze_count() == 0
    Tiers.pytest_runtest_logfinish(None)
    assert gc.get_freeze_count() > 10_000


def test_processor_seconds_count_running_and_ended_children():
    before = processor_seconds()
    code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert processor_seconds() - before > 0.2  # /proc counts in hundredths
    child.communicate()
    assert 0.2 < processor_seconds() - before < 30


MARKED = """
pytestmark = [pytest.mark.full, pytest.mark.promise("All " "of it.")]

@pytest.mark.promise("One.")
def test_one(): ...

@requires_gpus(1)
def test_two(): ...
"""
PARAMETRIZED = """
@pytest.mark.promise("One.")
@pytest.mark.parametrize("n", [full(1), 2])
def test_some(n): ...

@pytest.mark.promise("One.")
@pytest.mark.parametrize("n", [full(1), full(2)])
def test_all(n): ...
"""


promises = functools.cache(read_promises)


def marked_texts(root: Path) -> set[str]:
    """Return the texts of all promises, wherever in a file of tests/ they stand."""
    texts = [text for path in (root / "tests").rglob("*.py") if "mark.promise" in (text := path.read_text())]
    calls = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "pytest.mark.promise"}


def test_the_page_of_promises_is_that_of_the_marks():
    shown = promises()
    page = render(shown)
    assert PAGE.read_text() == page, "run `python -m tests.tiers.promises`"
    assert render([one for one in shown if one.promise != shown[0].promise]) != page != render(shown[1:])
    assert all(f"\n## {section}\n" in page for section in SECTIONS)
    texts = {one.promise for one in shown}
    assert 50 <= len(texts) <= 100 and [t for t in texts if not t.endswith(".") or "|" in t or len(t) > 220] == []


def test_every_promise_is_shown_by_a_test(tmp_path):
    assert marked_texts(ROOT) == {one.promise for one in promises()}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_none.py").write_text('pytestmark = pytest.mark.promise("Nothing shows it.")')
    assert marked_texts(tmp_path) == {"Nothing shows it."} and read_promises(tmp_path) == []


def test_promises_are_counted_by_tier(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(MARKED)
    (tmp_path / "tests" / "test_b.py").write_text(PARAMETRIZED)
    assert [(one.promise, one.test, one.tier) for one in read_promises(tmp_path)] == [
        ("All of it.", "test_one", FULL),
        ("One.", "test_one", FULL),
        ("All of it.", "test_two", GPU),
        ("One.", "test_some", CORE),
        ("One.", "test_all", FULL),
    ]
    (tmp_path / "tests" / "test_c.py").write_text("@pytest.mark.promise(TEXT)\ndef test_it(): ...")
    with pytest.raises(ValueError, match="a promise is one literal text"):
        read_promises(tmp_path)
