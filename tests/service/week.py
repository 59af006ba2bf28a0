r"""A week of nights in an hour: a schedule of every two minutes on one `athanor up`, which is disturbed all the while.

    python -m tests.service.week --minutes 60 --out week.md          # as root, with a C compiler

Every few minutes the model of the nights is deleted, so that the next night trains, and something happens to it: a
program is killed or hangs, the process that watches the programs is killed and started again, the disk fills, the clock
jumps. At the end each night must have one run with an end of its own, and no process may be left. Not a test of pytest,
because it takes an hour.
"""

import contextlib
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.bench.command import bench_folder, make_parser, print_report, table_head, table_row
from tests.helpers.service import ENDED, RunningService, lines, processes_with, wait_for
from tests.helpers.small_run import SMALL

CLOCK = Path(__file__).parents[1] / "helpers/jumping_clock.c"
EVERY = 2  # minutes
PROGRAMS = "worker", "prefect", "mlflow"
NIGHT = {**SMALL, "train.num_steps": 200, "execution.checkpoint.save_interval": 20}
DISK = "size=2g"


class Week:
    """The service, what is done to it, and what was said of it."""

    def __init__(self, place: Path) -> None:
        library, self.moved = place / "clock.so", place / "moved"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(CLOCK), "-ldl"], check=True)
        self.moved.write_bytes(struct.pack("<q", 0))
        self.root, self.environment = place / "disk/root", {"LD_PRELOAD": library, "JUMPING_CLOCK": self.moved}
        self.environment = {name: str(path) for name, path in self.environment.items()}
        self.service = RunningService(self.root, environment=self.environment)
        self.said: list[str] = []

    def say(self, what: str) -> None:
        self.said.append(f"{datetime.now(UTC):%H:%M:%S} {what}")
        print(self.said[-1], flush=True)

    def now(self) -> datetime:
        """Return the time as the service sees it."""
        return datetime.now(UTC) + timedelta(seconds=struct.unpack("<q", self.moved.read_bytes())[0])

    def set_schedule(self, is_active: bool) -> None:
        nightly = self.service.deployment("vlm-sft-nightly")
        (schedule,) = nightly["schedules"]
        cron = {"cron": f"*/{EVERY} * * * *", "timezone": "UTC"}
        body = {"active": is_active, "schedule": cron, "parameters": {"set": lines(NIGHT)}}
        self.service.prefect(f"/deployments/{nightly['id']}/schedules/{schedule['id']}", body, method="PATCH")

    def wait_for_training(self) -> None:
        """Delete what the nights have trained, once all have ended, and wait until the next one trains."""
        wait_for(self.has_ended, 900, "end", self.service.tell)
        for path in self.root.glob("artifacts/train/*"):
            shutil.rmtree(path)
        # A clock that went back shows for 10 minutes times whose nights have been.
        wait_for(lambda: any(self.root.glob("scratch/train-*/metrics.jsonl")), 1000, "training", self.service.tell)

    def kill(self, part: str) -> None:
        self.service.program(part).kill()

    def hang(self, part: str) -> None:
        process = self.service.program(part)
        process.suspend()
        time.sleep(90)
        with contextlib.suppress(psutil.NoSuchProcess):  # it was taken for dead, and started anew
            process.resume()

    def kill_watcher(self) -> None:
        self.service.kill()
        time.sleep(60)
        self.service = RunningService(self.root, environment=self.environment)

    def fill_disk(self) -> None:
        ballast = self.root.parent / "ballast"
        with ballast.open("wb") as file:
            for _ in range(shutil.disk_usage(self.root).free // 1_000_000):
                file.write(bytes(1_000_000))
        time.sleep(EVERY * 60)
        ballast.unlink()

    def move_clock(self, minutes: int) -> None:
        moved = struct.unpack("<q", self.moved.read_bytes())[0] + 60 * minutes
        with self.moved.open("r+b") as file:  # the same file, which the processes have mapped
            file.write(struct.pack("<q", moved))

    def memory(self) -> dict[str, int]:
        """Return the bytes of each program without the flows that it runs."""
        return {part: process.memory_info().rss for part in PROGRAMS if (process := self.service.program(part))}

    def nights(self) -> list[dict[str, Any]]:
        """Return the runs that the schedule has made and that are due, by the time at which they were."""
        body = {"deployments": {"name": {"any_": ["vlm-sft-nightly"]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 200}
        runs = self.service.prefect("/flow_runs/filter", body)
        return [run for run in runs if datetime.fromisoformat(run["expected_start_time"]) <= self.now()]

    def has_ended(self) -> bool:
        with contextlib.suppress(OSError):  # the server was killed a moment ago
            return all(run["state_type"] in ENDED for run in self.nights())
        return False


def disturb(week: Week, minutes: float) -> None:
    """Do one thing after the other to trainings of the schedule, until the time is over."""
    things = {f"kill -9 of {part}": partial(week.kill, part) for part in PROGRAMS}
    things |= {f"{part} hangs for 90 s": partial(week.hang, part) for part in PROGRAMS}
    things |= {"kill -9 of athanor up, started again after a minute": week.kill_watcher}
    things |= {"the disk is full for two minutes": week.fill_disk}
    things |= {"the clock is 10 minutes on": partial(week.move_clock, 10)}
    things |= {"the clock is 10 minutes back": partial(week.move_clock, -10)}
    end = time.monotonic() + 60 * minutes
    while True:
        for what, thing in things.items():
            week.wait_for_training()
            if time.monotonic() > end:
                return
            week.say(what)
            thing()


def judge(week: Week, began: datetime) -> list[str]:
    """Return the table of the nights' ends, and what is wrong."""
    nights = week.nights()
    times = Counter(datetime.fromisoformat(run["expected_start_time"]) for run in nights)
    wrong = [f"{when:%H:%M} has {count} runs" for when, count in times.items() if count > 1]
    due = began.replace(second=0, microsecond=0) + timedelta(minutes=EVERY - began.minute % EVERY)
    while due < max(times):
        wrong += [] if due in times else [f"{due:%H:%M} has no run"]
        due += timedelta(minutes=EVERY)
    ends = Counter((run["state_name"], (run["state"]["message"] or "")[:110]) for run in nights)
    table = [table_head(["end", "message"], ["nights"])]
    table += [table_row([*end, count]) for end, count in ends.most_common()]
    runs = Counter(run["info"]["status"] for run in week.service.mlflow_runs())
    return [*table, "", f"MLflow: {dict(runs)}", *wrong]


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with bench_folder() as place:
        (place / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(place / "disk")], check=True)
        try:
            week = Week(place)
            began = week.now()
            week.set_schedule(True)
            week.wait_for_training()
            before = week.memory()
            disturb(week, args.minutes)
            week.set_schedule(False)
            wait_for(week.has_ended, 900, "end of all nights", week.service.tell)
            report = [*week.said, "", *judge(week, began), ""]
            after = week.memory()
            report += [
                f"{part}: {before[part] / 1e6:.0f} MB before, {after[part] / 1e6:.0f} after" for part in PROGRAMS
            ]
            week.service.stop()
            left = [*week.service.processes(), *processes_with("ATHANOR_ROOT", str(week.root))]
            report.append(f"processes left: {left or 'none'}")
        finally:
            subprocess.run(["umount", "--lazy", str(place / "disk")], check=True)
    print_report("\n".join(report), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
