"""Runs the longest files first, reports files that became slow, and skips those that do not fit into a number of
seconds.

`tests/durations.json` holds, for each file and tier, the seconds that its tests took when `--record-durations` was last
used.
"""

import gc
import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
SLOWER, LEAST_SECONDS = 1.5, 10.0  # a file is reported from this many times its record and this many seconds on


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--record-durations", action="store_true", help="write the seconds of each file's tests")
    group.addoption("--budget", type=float, help="seconds; a file that would end later, by its record, is skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(config), "athanor-tiers")


def read_durations() -> dict[str, dict[str, float]]:
    """Return file -> tier -> recorded seconds."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}


class Tiers:
    """The hooks of one session, or of one of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.began = config, time.monotonic()
        self.tier = "core" if "not full" in config.option.markexpr else "full"
        self.recorded = {file: tiers.get(self.tier, 0.0) for file, tiers in read_durations().items()}
        self.seconds: dict[str, float] = defaultdict(float)
        self.begun: set[str] = set()
        self.left_out: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the longest files first. A file without a record comes before all others, because it may be long."""
        items.sort(key=lambda item: -self.recorded.get(_file(item.nodeid), float("inf")))

    def pytest_collection_finish(self) -> None:
        """Exclude all objects that the imports made from later garbage collections, which would visit them again and
        again."""
        gc.freeze()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip the tests of a file that by its record would not end within the budget."""
        budget, file = self.config.option.budget, _file(item.nodeid)
        if budget is not None and file not in self.begun:
            ended = time.monotonic() - self.began + self.recorded.get(file, 0.0)
            if ended > budget:
                pytest.skip(f"out of time: would end after {ended:.0f} s of a budget of {budget:.0f} s")
        self.begun.add(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of one phase of a test to those of its file."""
        file = _file(report.nodeid)
        self.seconds[file] += report.duration
        if report.skipped and "out of time" in str(report.longrepr):
            self.left_out.add(file)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what did not fit into the budget and which files became slow. Write the record if that is asked for."""
        if self.left_out:
            terminalreporter.write_line(f"did not fit into the budget: {', '.join(sorted(self.left_out))}")
        for line in slower_than_recorded(self.seconds, self.recorded):
            terminalreporter.write_line(line)
        if self.config.option.record_durations:
            write_durations(self.seconds, self.tier)


def slower_than_recorded(seconds: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """Return one line for each file that takes half as long again as recorded, relative to this machine's speed.

    The machine's speed is the ratio of the seconds of all files to their recorded seconds, so that a busy or slow
    machine
    does not make every file slow.
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
    root = DURATIONS.parents[1]
    found = {file: tiers for file, tiers in read_durations().items() if (root / file).is_file()}
    for file, value in seconds.items():
        found.setdefault(file, {})[tier] = round(value, 1)
    DURATIONS.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
