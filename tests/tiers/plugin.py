"""Runs the longest files first, measures what tests cost, reports files that became slow, keeps a ledger of results.

`tests/durations.json` holds, for each file and tier, the processor seconds of its tests (user and system, with all
processes that they started), so a loaded machine changes nothing.
"""

import functools
import gc
import json
import re
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.tiers.processor import processor_seconds

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
SLOWER, LEAST_SECONDS = 1.5, 10.0  # a file is reported from this many times its record and this many seconds on

_unfreeze = gc.unfreeze
_unfrozen: list[bool] = []  # not empty: the current test has called gc.unfreeze

_STARTS_RANKS = re.compile(
    r"helpers\.(world|features|resuming)\b|\brun_trainer, write_job\b|processes=0|import world\b"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--record-durations", action="store_true", help="write the processor seconds of each file's tests")
    group.addoption("--ledger", help="append each result to this file; leave out tests that passed there")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(config), "athanor-tiers")
    gc.disable()  # until the collection ends: otherwise two fifths of its time go into looking at what it imports
    gc.unfreeze = _unfreeze_for_one_test


def _unfreeze_for_one_test() -> None:
    """The loop of a training ends with gc.unfreeze. megatron-core collects garbage before each save and load, and would
    from then on visit everything that the whole suite has imported: a processor second each time."""
    _unfrozen.append(True)
    _unfreeze()


def read_durations() -> dict[str, dict[str, float]]:
    """Return file -> tier -> recorded processor seconds."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}


def read_ledger(path: Path) -> list[dict]:
    """Return the rows of a ledger: one for each test that ended, and one for each part of the suite."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def passed_in(path: Path) -> set[str]:
    """Return the tests whose last result in a ledger is that they passed or were skipped."""
    last = {row["test"]: row["outcome"] for row in read_ledger(path) if "test" in row}
    return {test for test, outcome in last.items() if outcome != "failed"}


@functools.cache
def starts_ranks(file: str) -> bool:
    """Whether a test file uses the server of tests/helpers/world.py."""
    return _STARTS_RANKS.search((ROOT / file).read_text()) is not None


class ByFile(LoadFileScheduling):
    """One file to a worker, but all of tests/flows/ to one: each process that runs a flow imports Prefect and MLflow
    and starts a server of its own, which costs 30 processor seconds. In the core, all files that start ranks to one
    too: the server that forks them takes ten."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/flows/"):
            return "tests/flows"
        if "not full" in self.config.option.markexpr and starts_ranks(_file(nodeid)):
            return "ranks"
        return super()._split_scope(nodeid)


class Tiers:
    """The hooks of one session, or of one of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tier = "core" if "not full" in config.option.markexpr else "full"
        self.recorded = {file: tiers.get(self.tier, 0.0) for file, tiers in read_durations().items()}
        self.seconds: dict[str, float] = defaultdict(float)
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)  # of tests that have not ended
        self.used: float | None = None  # at the last report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the longest files first. A file without a record comes before all others, because it may be long."""
        if ledger := self.config.option.ledger:
            passed = passed_in(Path(ledger))
            self.config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
            items[:] = [item for item in items if item.nodeid not in passed]
        items.sort(key=lambda item: -self.recorded.get(_file(item.nodeid), float("inf")))

    def pytest_collection_finish(self) -> None:
        """Exclude all objects that the imports made from later garbage collections, which would visit them again and
        again."""
        gc.freeze()
        gc.enable()

    def pytest_runtest_logstart(self) -> None:
        if self.used is None:  # the seconds of imports and collection are no test's
            self.used = processor_seconds()

    def pytest_runtest_logfinish(self) -> None:
        if _unfrozen:
            gc.freeze()
            _unfrozen.clear()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> LoadFileScheduling:
        return ByFile(config, log)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write the processor seconds since the end of the test before into the last report of each test."""
        report = yield
        if report.when == "teardown":
            now = processor_seconds()
            if now < self.used:  # Linux leaves out some of a process's children if another one ends while it lists them
                now = processor_seconds()
            report.processor_seconds = max(0.0, now - self.used)
            self.used = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of one phase of a test to those of its file, and write a test that ended into the ledger."""
        self.seconds[_file(report.nodeid)] += _seconds_of(report)
        ledger = self.config.option.ledger
        if ledger and not hasattr(self.config, "workerinput"):
            self.reports[report.nodeid].append(report)
            if report.when not in ("setup", "call"):  # the teardown, or the crash of a worker
                with open(ledger, "a") as file:
                    file.write(json.dumps(_row(report.nodeid, self.reports.pop(report.nodeid))) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print which files became slow. Write the record if that is asked for."""
        for line in slower_than_recorded(self.seconds, self.recorded):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"{sum(self.seconds.values()):.0f} processor seconds in tests")
        if self.config.option.record_durations:
            write_durations(self.seconds, self.tier)


def _seconds_of(report: pytest.TestReport) -> float:
    return getattr(report, "processor_seconds", 0.0)


def _row(test: str, reports: list[pytest.TestReport]) -> dict[str, object]:
    outcomes = {report.outcome for report in reports}
    outcome = next((found for found in ("failed", "skipped") if found in outcomes), "passed")
    why = next((str(report.longrepr[2]) for report in reports if report.skipped), "") if outcome == "skipped" else ""
    seconds = round(sum(map(_seconds_of, reports)), 2)
    return {"test": test, "outcome": outcome, "why": why.removeprefix("Skipped: "), "seconds": seconds}


def slower_than_recorded(seconds: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """Return one line for each file that takes half as long again as recorded, relative to this machine's speed.

    The machine's speed is the ratio of the seconds of all files to their recorded seconds.
    """
    known = {file: recorded[file] for file in seconds if recorded.get(file)}
    speed = sum(seconds[file] for file in known) / sum(known.values()) if known else 1.0
    slow = {
        file: (seconds[file], before * speed)
        for file, before in known.items()
        if seconds[file] > max(SLOWER * before * speed, LEAST_SECONDS)
    }
    ordered = sorted(slow.items(), key=lambda item: item[1][1] - item[1][0])
    return [f"slower than recorded: {file}: {now:.0f} s, expected {before:.0f} s" for file, (now, before) in ordered]


def write_durations(seconds: dict[str, float], tier: str) -> None:
    """Replace the record of one tier's files; files that no longer exist are dropped."""
    found = {file: tiers for file, tiers in read_durations().items() if (ROOT / file).is_file()}
    for file, value in seconds.items():
        found.setdefault(file, {})[tier] = round(value, 1)
    DURATIONS.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
