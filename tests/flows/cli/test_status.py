"""`athanor status`: the line for each state of a run, and a root without a run."""

import contextlib
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from flows.cli import status
from flows.cli.main import main
from flows.cli.status import Run, _now, _when
from flows.service.programs import worker_name
from tests.helpers.tracked_run import make_artifact

HOUR = timedelta(hours=1)


class Runs:
    """Returns the tasks and the log lines of one flow run, the newest first."""

    def __init__(self, tasks=(), logs=()):
        self.tasks, self.logs = tasks, logs

    def running_tasks(self, run):
        return self.tasks

    def newest_logs(self, run, count):
        return self.logs[:count]


def run(kind: str, message: str = "", start: timedelta = -HOUR) -> Run:
    at = datetime.now(UTC) + start
    return Run("id", "name", kind, kind.title(), message, at, is_due=start < timedelta(), seconds=75.0)


@pytest.mark.parametrize(
    ("of", "runs", "text"),
    [
        (run("SCHEDULED"), Runs(), "waits for a free worker (`athanor up --max-runs`)"),
        (run("SCHEDULED", start=HOUR), Runs(), "waits for its scheduled start"),
        (run("PENDING", "AwaitingConcurrencySlot"), Runs(), "waits: AwaitingConcurrencySlot"),
        (run("PAUSED"), Runs(), "waits for Resume on Prefect's page"),
        (run("COMPLETED", "all good"), Runs(), "took 75 s"),
        (run("FAILED", "train: loss is nan\nmore"), Runs(), "took 75 s: train: loss is nan"),
        (run("RUNNING"), Runs(["train"], ["step 3 of 9"]), "train"),
        (run("RUNNING"), Runs(["train"], ["waiting for a slot"]), "train: waiting for a slot"),
        (run("RUNNING"), Runs(["train"], ["got a slot of 'gpu' after 3 s", "waiting for a slot"]), "train"),
        (run("RUNNING"), Runs(), "starting"),
    ],
)  # fmt: skip
def test_what_a_run_does_or_waits_for(of, runs, text):
    assert _now(runs, of) == text


def test_a_time_is_in_utc():
    assert _when(run("SCHEDULED")) == (datetime.now(UTC) - HOUR).strftime("%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(("age", "line"), [(timedelta(minutes=5), True), (timedelta(seconds=8), False)])
def test_a_silent_worker_and_refused_schedules_are_told_of(age, line, tmp_path, capsys, monkeypatch):
    beat = datetime.now(UTC) - age
    record = SimpleNamespace(prefect_api="http://here/api", prefect_ui="http://here", pid=7)
    asked = []

    def last_heartbeat(*about: str) -> datetime:
        asked.append(about)
        return beat

    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "athanor:word")
    monkeypatch.setattr(status, "read_service", lambda root: record)
    monkeypatch.setattr(status, "last_heartbeat", last_heartbeat)
    monkeypatch.setattr(status, "runs_of", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(status, "refused_schedules", lambda *about: [f"schedule: {about}"])
    assert main(["status", "--root", str(tmp_path)]) == 0
    assert asked == [("http://here/api", "athanor:word", worker_name(7))]
    told = f"worker: no heartbeat since {beat:%Y-%m-%d %H:%M:%S} UTC\n" if line else ""
    told += "schedule: ('http://here/api', 'athanor:word')\n"
    assert capsys.readouterr().out.partition("\n")[2] == f"{told}it has no run yet\n"


def test_a_root_without_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    assert main(["status", "--root", str(tmp_path / "root")]) == 0
    assert capsys.readouterr().out == f"root {tmp_path / 'root'}: no `athanor up` serves it\nit has no run yet\n"
    assert not (tmp_path / "root").exists()


def test_the_bytes_of_each_stage_and_what_could_be_freed(tmp_path, capsys, monkeypatch):
    for name in ("PREFECT_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    made = make_artifact(tmp_path, "convert", "1" * 16)
    (made.dir / "data").write_bytes(b"x" * 1_000_000)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.log").write_bytes(b"x" * 2_000_000)
    (tmp_path / ".athanor-root").touch()
    assert main(["status", "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Bytes, 3 MB in all" in printed and printed.index("logs     2 MB") < printed.index("convert  1 MB")
    assert printed.endswith("`athanor gc` would free 1 MB\n") and made.dir.is_dir()
    (tmp_path / "mlflow.db").write_bytes(b"x" * 9000)
    assert main(["status", "--root", str(tmp_path)]) == 0
    assert "`athanor gc` would refuse: " in capsys.readouterr().out
    (made.dir / "manifest.json").write_text("{")
    make_artifact(tmp_path, "tokenize", "2" * 16, parents={"samples": made.parent()}).dir.rename(
        tmp_path / "artifacts" / "tokenize" / ("3" * 16)
    )
    assert main(["status", "--root", str(tmp_path)]) == 0, "whatever is damaged"
    assert re.search(r"convert +1 MB", capsys.readouterr().out)
