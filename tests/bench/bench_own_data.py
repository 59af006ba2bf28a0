"""A user's own data to a scored model in two commands, on a CPU: seconds of each command, for layouts drawn by a seed.

    python -m tests.bench.bench_own_data --layouts 15 --seed 0 --rows 120

Each layout is a folder of rows drawn anew: `athanor init FOLDER`, then `athanor run` with the recipe as it was written.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.own_data import LAYOUTS, draw_rows

REPO = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the layouts' order and their rows")
    parser.add_argument("--rows", type=int, default=120, help="at most, half of them at least (%(default)s)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    print(
        "| layout | builder | rows | init s | run s | exit | score |\n| --- | --- | ---: | ---: | ---: | ---: | --- |"
    )
    for name in rng.sample(list(LAYOUTS), args.layouts):
        number = rng.randint(args.rows // 2, args.rows)
        with tempfile.TemporaryDirectory() as directory:
            print(_row(name, Path(directory), draw_rows(rng.randrange(10**6), number)), flush=True)


def _row(name: str, directory: Path, rows: list) -> str:
    write, builder = LAYOUTS[name]
    write(directory / "data", rows)
    init_seconds, init = _athanor(directory, "init", "data")
    if init.returncode:
        return (
            f"| {name} | {builder} | {len(rows)} | {init_seconds:.1f} | | {init.returncode} | {init.stderr.strip()} |"
        )
    run_seconds, run = _athanor(directory, "run", "data.yaml")
    registered = next((line for line in run.stdout.splitlines() if line.startswith(("Registered", "Not reg"))), "")
    score = registered.partition(": ")[2].partition(",")[0] if run.returncode == 0 else run.stderr.strip()[-200:]
    return f"| {name} | {builder} | {len(rows)} | {init_seconds:.1f} | {run_seconds:.0f} | {run.returncode} | {score} |"


def _athanor(directory: Path, *words: str) -> tuple[float, subprocess.CompletedProcess]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "flows.cli.main", *words]
    env = {"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
    return time.perf_counter() - start, done


if __name__ == "__main__":
    main()
