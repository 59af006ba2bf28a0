"""Failures of the machine during `athanor run`: nothing is lost, and the message is one line with the way out."""

import contextlib
import json
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.helpers.patience import at_most
from tests.helpers.service import clean_environment, processes_with, wait_for
from tests.helpers.small_run import SMALL
from tests.helpers.trees import tree_digest

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A minute without processors, a jumping clock, a deleted root, a bad database, few open files or a full "
        "disk costs no finished work."
    ),
]

SETTINGS = {**SMALL, "train.num_steps": 120, "train.heldout_interval": 120, "execution.checkpoint.save_interval": 60}
JUMPING_CLOCK = Path(__file__).parents[1] / "helpers/jumping_clock.c"


class Run:
    """An `athanor run` in a process of its own.

    Attributes:
        root: root of the run.
        process: process of the command.
    """

    def __init__(
        self,
        root: Path,
        settings: Mapping[str, object] = SETTINGS,
        *,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root = root
        number = len(list(root.parent.glob(f"{root.name}-*.txt")))
        self._output = root.parent / f"{root.name}-{number}.txt"
        words = [f"--set={key}={value}" for key, value in settings.items()]
        command = [*before, sys.executable, "-m", "flows.cli.main", "run", "--root", str(root), *words]
        with self._output.open("wb") as out:
            self.process = subprocess.Popen(
                command, env={**clean_environment(), **(environment or {})}, stdout=out, stderr=out
            )

    def end(self, status: int = 0, seconds: float = 400) -> str:
        """Wait until the run has ended with this status, and return its output."""
        assert self.process.wait(seconds) == status, self.said()
        return self.said()

    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_for_steps(self) -> None:
        wait_for(lambda: any(p.stat().st_size for p in self.root.glob("scratch/train-*/metrics.jsonl")), 240, "steps")

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run: the command, its servers and workers, torchrun and its ranks."""
        jobs = [p for scratch in self.root.glob("scratch/*") for p in processes_with("ATHANOR_JOB", str(scratch))]
        command = psutil.Process(self.process.pid)
        return list({*jobs, command, *command.children(recursive=True)})

    def losses(self) -> list[tuple[float, float]]:
        (path,) = self.root.glob("artifacts/train/*/metrics.jsonl")
        return [(row["loss"], row["grad_norm"]) for row in map(json.loads, path.read_text().splitlines())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed") / "root")
    run.end()
    return run


def last_line(said: str) -> str:
    assert "Traceback" not in said
    return said.splitlines()[-1]


def test_a_minute_without_the_processors_changes_nothing(tmp_path, undisturbed):
    run = Run(tmp_path / "root")
    run.wait_for_steps()
    processes = run.processes()
    assert len(processes) >= 3
    for process in processes:
        process.suspend()
    time.sleep(60)
    for process in processes:
        process.resume()
    run.end()
    assert run.losses() == undisturbed.losses()


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_jumps_an_hour_changes_nothing(tmp_path, undisturbed, hours):
    library, moved = tmp_path / "jumping_clock.so", tmp_path / "moved"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(JUMPING_CLOCK), "-ldl"], check=True)
    moved.write_bytes(struct.pack("<q", 0))
    run = Run(tmp_path / "root", environment={"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(moved)})
    run.wait_for_steps()
    with moved.open("r+b") as file:  # the same file, which the processes have mapped
        file.write(struct.pack("<q", 3600 * hours))
    run.end()
    assert run.losses() == undisturbed.losses()


def test_a_root_that_is_deleted_ends_the_run_in_one_line(tmp_path):
    run = Run(tmp_path / "root", {**SETTINGS, "train.num_steps": 5000})
    run.wait_for_steps()
    wait_for(lambda: shutil.rmtree(run.root, ignore_errors=True) or not run.root.exists(), 20, "end of the root")
    said = run.end(1, 120)
    assert "was deleted during the run; the same command starts again" in last_line(said)
    assert not [path for path in run.root.rglob("*") if path.is_dir() and "artifacts" in path.parts]


def test_four_runs_of_two_recipes_on_one_root_at_once(tmp_path, undisturbed):
    other = {**SETTINGS, "data.seed": 7}
    runs = [
        Run(tmp_path / "root", {**settings, "train.seed": seed}) for settings in (SETTINGS, other) for seed in (0, 1)
    ]
    for run in runs:
        run.end(seconds=900)
    trained = list((tmp_path / "root").glob("artifacts/train/*/metrics.jsonl"))
    assert len(trained) == 4
    ours, *_ = undisturbed.root.glob("artifacts/train/*")
    same = tree_digest(tmp_path / "root/artifacts/train" / ours.name)
    assert same.keys() == tree_digest(ours).keys()
    again = Run(tmp_path / "root").end()
    assert "0 of 15 stages made, 15 reused" in again


def test_a_database_that_is_locked_for_90_seconds_loses_no_metric(tmp_path):
    run = Run(tmp_path / "root")
    run.wait_for_steps()
    with contextlib.closing(
        sqlite3.connect(run.root / "mlflow.db", isolation_level=None, timeout=at_most(60))
    ) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(90)
        database.execute("ROLLBACK")
    said = run.end()
    assert "MLflow does not answer" in said and "the pipeline goes on" in said
    # If the training ended before the database was free, the next command sends the rest.
    sync = [sys.executable, "-m", "flows.cli.main", "sync", "--root", str(run.root)]
    assert subprocess.run(sync, env=clean_environment(), capture_output=True).returncode == 0
    with contextlib.closing(sqlite3.connect(run.root / "mlflow.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM metrics WHERE key = 'loss'").fetchone() == (120,)
        assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]


def test_too_few_open_files_are_named_with_the_way_out(tmp_path):
    run = Run(tmp_path / "root", before=["/bin/bash", "-c", 'ulimit -n 64; exec "$@"', "run"])
    line = last_line(run.end(1))
    assert "ran out of open files: 64 are too few; `ulimit -n 4096`, and the same command resumes" in line
    Run(tmp_path / "root").end()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Make a file system of 200 MB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("stage", ["train", "export"])
def test_a_disk_that_fills_costs_the_stage_that_it_filled_in_alone(small_disk, undisturbed, stage):
    root = small_disk / "root"
    Run(root).end()
    finished = tree_digest(root / "artifacts/plan_bins")
    later = ("train", "export", "answer", "evaluate", "compare", "release")
    for name in later[later.index(stage) :]:
        shutil.rmtree(root / "artifacts" / name)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        left = shutil.disk_usage(small_disk).free - 300_000
        file.write(bytes(left))
    # MLflow may warn after the error, of an earlier run whose export is gone before a slow machine registered it.
    (line,) = (line for line in Run(root).end(1).splitlines() if f"the disk of --root {root} is full" in line)
    assert "the same command resumes from the finished work" in line
    ballast.unlink()
    run = Run(root)
    run.end()
    assert run.losses() == undisturbed.losses()
    assert tree_digest(root / "artifacts/plan_bins") == finished
