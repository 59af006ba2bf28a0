"""Run all tests in parts that can be stopped and resumed: `make test-full`, or one part by `make test-full PART=3/6`.

    python -m tests.tiers.full [--part K/N] [--workers N] [pytest's arguments]

Every result is appended to build/full_pass/<commit>.jsonl at once. Tests that passed there do not run again, so the
same command goes on after a stop, on another machine too if the file is copied there. A later commit takes over the
results of the tests that the difference cannot reach (changed.py). When all parts have passed, tests/full_pass.json is
written: the commit, the machine of each part, seconds, what passed, why the rest was skipped, and what was taken over.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path

from tests.tiers.changed import FULL_PASS, UNKNOWN_SECONDS, changed_paths, git, run_files, tests_for
from tests.tiers.plugin import ROOT, passed_in, read_durations, read_ledger, write_durations

WRITTEN = ("full_pass.json", "durations.json")  # by this module
PARTS = 6
MACHINE = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def divide(seconds: dict[str, float], parts: int) -> list[list[str]]:
    """Return the files of each part: the longest file first, each into the part that has the fewest seconds so far."""
    divided: list[list[str]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        part = sums.index(min(sums))
        divided[part].append(file)
        sums[part] += seconds[file]
    return divided


def run_part(name: str, files: list[str], ledger: Path, workers: int, arguments: list[str]) -> bool:
    """Run the files' tests that have not passed yet, and return whether all have passed now."""
    began = time.monotonic()
    files = [file for file in files if file not in ended(read_ledger(ledger))]
    has_passed = not files or run_files(sorted(files), workers, [f"--ledger={ledger}", *arguments]) == 0
    seconds = round(time.monotonic() - began)
    row = {"part": name, "machine": MACHINE, "clock_seconds": seconds, "passed": has_passed, "files": files}
    with ledger.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return has_passed


def take_over(ledger: Path) -> None:
    """Begin a ledger with the results of the newest other one, but for the tests that the difference of the two commits
    can reach."""
    others = sorted(ledger.parent.glob("?" * 40 + ".jsonl"), key=lambda path: -path.stat().st_mtime)
    if ledger.exists() or not others:
        return
    commit = others[0].stem
    reached = tests_for(changed_paths(commit))
    rows = []
    for row in read_ledger(others[0]):
        if "part" in row:
            rows.append({**row, "files": [file for file in row["files"] if file not in reached]})
        elif row["test"].partition("::")[0] not in reached:
            rows.append({"commit": commit, **row})
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"{len(passed_in(ledger))} results of {commit[:10]} are taken over: the difference does not reach their tests"
    )


def ended(rows: list[dict]) -> set[str]:
    """Return the files of which all tests have passed or were skipped."""
    return {file for row in rows if row.get("passed") for file in row["files"]}


def joined(rows: list[dict], files: set[str]) -> dict | None:
    """Return what tests/full_pass.json says of a ledger, or None if a file has not passed yet."""
    if not files <= ended(rows):
        return None
    tests = [row for row in rows if "test" in row]
    last = {row["test"]: row for row in tests}
    failed = sorted({row["test"] for row in tests if row["outcome"] == "failed"})
    skipped = Counter(row["why"] for row in last.values() if row["outcome"] == "skipped")
    taken_over = Counter(row["commit"] for row in last.values() if "commit" in row)
    clock: Counter[str] = Counter()
    for row in (row for row in rows if "part" in row):
        clock[row["part"]] += row["clock_seconds"]
    return {
        "passed": len(last) - skipped.total(),
        "skipped": dict(skipped.most_common()),
        "failed_before_they_passed": failed,
        "taken_over": dict(taken_over),
        "machines": {row["part"]: row["machine"] for row in rows if "part" in row},
        "clock_seconds": dict(sorted(clock.items())),
        "processor_seconds": round(sum(row["seconds"] for row in tests)),
    }


def main(argv: list[str]) -> int:
    """Run one part or all, and record the commit if every part has passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.full")
    parser.add_argument(
        "--part", default="", help=f"K/N: the K-th of N parts; default: all {PARTS}, one after the other"
    )
    parser.add_argument("--workers", type=int, default=3, help="processes")
    args, rest = parser.parse_known_args(argv)
    number, _, count = (args.part or f"0/{PARTS}").partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) <= int(count) and (int(number) or not args.part)):
        parser.error(f"--part {args.part} is not of the form 3/6")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!tests/{name}" for name in WRITTEN))
    commit = git("rev-parse", "HEAD")
    ledger = ROOT / "build" / "full_pass" / f"{commit}.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    if changed:
        print(f"these files differ from HEAD, so nothing is recorded of this run:\n{changed}")
        ledger = ledger.with_name("uncommitted.jsonl")
        ledger.unlink(missing_ok=True)
    else:
        take_over(ledger)
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    recorded = read_durations()
    divided = divide({file: recorded.get(file, {}).get("full", UNKNOWN_SECONDS) for file in files}, int(count))
    has_passed = True
    for place, chosen in enumerate(divided, start=1):
        if place == int(number) or not int(number):
            has_passed &= run_part(f"{place}/{count}", chosen, ledger, args.workers, rest)
    rows = read_ledger(ledger)
    whole = None if changed or rest else joined(rows, set(files))
    if whole:
        date = git("log", "-1", "--format=%cs")
        FULL_PASS.write_text(json.dumps({"commit": commit, "date": date, **whole}, indent=1) + "\n")
        seconds: Counter[str] = Counter()
        for row in rows:
            seconds[row.get("test", "").partition("::")[0]] += row.get("seconds", 0.0)
        write_durations({file: seconds[file] for file in files}, "full")
        print(f"all tests of {commit[:10]} passed; recorded in {FULL_PASS.relative_to(ROOT)}")
    else:
        print(f"{len(passed_in(ledger))} tests have passed or were skipped by {ledger.relative_to(ROOT)}")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
