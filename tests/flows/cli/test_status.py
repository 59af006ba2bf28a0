"""`athanor status`: the line for each state of a run, and a root without a run."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State, StateType

from flows.cli.commands.status import _now, _when
from flows.cli.main import main

HOUR = timedelta(hours=1)


class Client:
    """A client that returns the task runs and the log lines of one flow run, the newest first."""

    def __init__(self, tasks=(), logs=()):
        self.tasks, self.logs = tasks, logs

    def read_task_runs(self, **_):
        return [SimpleNamespace(name=name) for name in self.tasks]

    def read_logs(self, *_, **__):
        return [SimpleNamespace(message=message) for message in self.logs]


def run(kind: StateType, message: str | None = None, start: timedelta = -HOUR):
    at = datetime.now(UTC) + start
    state = State(type=kind, message=message)
    return SimpleNamespace(
        id=uuid4(), state=state, start_time=None, expected_start_time=at, total_run_time=timedelta(seconds=75)
    )


@pytest.mark.parametrize(
    ("of", "client", "text"),
    [
        (run(StateType.SCHEDULED), Client(), "waits for a free worker (`athanor up --max-runs`)"),
        (run(StateType.SCHEDULED, start=HOUR), Client(), "waits for its scheduled start"),
        (run(StateType.PENDING, "AwaitingConcurrencySlot"), Client(), "waits: AwaitingConcurrencySlot"),
        (run(StateType.COMPLETED, "all good"), Client(), "took 75 s"),
        (run(StateType.FAILED, "train: loss is nan\nmore"), Client(), "took 75 s: train: loss is nan"),
        (run(StateType.RUNNING), Client(["train"], ["step 3 of 9"]), "train"),
        (run(StateType.RUNNING), Client(["train"], ["waiting for a slot"]), "train: waiting for a slot"),
        (run(StateType.RUNNING), Client(["train"], ["got a slot of 'gpu' after 3 s", "waiting for a slot"]), "train"),
        (run(StateType.RUNNING), Client(), "starting"),
    ],
)  # fmt: skip
def test_what_a_run_does_or_waits_for(of, client, text):
    assert _now(client, of) == text


def test_a_time_is_in_utc():
    assert _when(run(StateType.SCHEDULED)) == (datetime.now(UTC) - HOUR).strftime("%Y-%m-%d %H:%M:%S")


def test_a_root_without_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    assert main(["status", "--root", str(tmp_path / "root")]) == 0
    assert capsys.readouterr().out == f"root {tmp_path / 'root'}: no `athanor up` serves it\nit has no run yet\n"
    assert not (tmp_path / "root").exists()
