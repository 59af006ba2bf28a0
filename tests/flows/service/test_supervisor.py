"""The supervisor, with small programs instead of servers: it starts them in order, restarts dead ones, and ends all."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flows.prefect_server.ports import is_free
from flows.prefect_server.processes import (
    PART_VARIABLE,
    SERVICE_VARIABLE,
    end_leftovers,
    log_tail,
    service_processes,
    trim_log,
)
from flows.service import run_service
from flows.service import supervisor as supervised
from flows.service.programs import Program
from flows.service.supervisor import StartFailed, StatusLines, Supervisor
from tests.helpers.object_store import free_port
from tests.helpers.patience import at_most
from tests.helpers.service import wait_for

LASTING = "import time; print('here', flush=True); time.sleep(600)"


class Kept(StatusLines):
    """Status lines that are kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(" ".join(text.split()))


@pytest.fixture
def lines() -> Kept:
    return Kept()


@pytest.fixture
def make(tmp_path) -> Callable[..., Program]:
    """Make a program from Python text. It counts as answering once it has printed a line and while `is_up` is true."""

    def make(name: str, code: str = LASTING, is_up: Callable[[], bool] | None = None) -> Program:
        log = tmp_path / f"{name}.log"
        environment = {**os.environ, SERVICE_VARIABLE: str(tmp_path), PART_VARIABLE: name}
        answers = is_up or (lambda: "here" in log.read_text())
        return Program(name, [sys.executable, "-c", code], environment, log, lambda _: answers(), "http://here")

    yield make
    for process in service_processes(tmp_path):
        process.kill()


def run(watcher: Supervisor, until: Callable[[], bool], seconds: float = 30) -> None:
    def turn() -> bool:
        watcher.turn()
        return until()

    wait_for(turn, seconds, "end", lambda: str(watcher.lines.said))


def test_programs_are_started_ended_and_told(make, lines):
    watcher = Supervisor([make("prefect"), make("mlflow")], lines)
    run(watcher, lambda: watcher.answers("prefect", "mlflow"))
    assert lines.said[:2] == ["prefect starting http://here", "mlflow starting http://here"]
    assert set(lines.said[2:]) == {"prefect ready http://here", "mlflow ready http://here"}
    for name in ("prefect", "mlflow"):
        watcher.ask_to_end(name)
        watcher.end(name)
        assert watcher.children[name].process.poll() is not None
    assert lines.said[-2:] == ["mlflow stopping", "mlflow stopped"] and not watcher.revived


def test_a_dead_one_is_started_again_and_that_is_told(make, lines):
    watcher = Supervisor([make("mlflow")], lines)
    run(watcher, lambda: watcher.answers("mlflow"))
    old = watcher.children["mlflow"].process
    old.kill()
    old.wait()
    (watcher.children["mlflow"].program.log_path).write_text("")
    run(watcher, lambda: watcher.revived == {"mlflow"})
    assert watcher.children["mlflow"].process.pid != old.pid
    assert "mlflow waiting died (signal 9); starts again" in lines.said
    assert lines.said[-1] == "mlflow ready http://here started again"


def test_one_that_dies_again_and_again_is_started_less_and_less_often(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "FIRST_TRIES", 99)
    watcher = Supervisor([make("mlflow", "raise SystemExit(3)")], lines)
    run(watcher, lambda: watcher.children["mlflow"].deaths >= 3)
    assert [line for line in lines.said if "died" in line] == [
        "mlflow waiting died (status 3); starts again",
        "mlflow waiting died (status 3); starts again in 1 s",
        "mlflow waiting died (status 3); starts again in 3 s",
    ]


def test_a_server_that_hangs_is_killed_and_started_again(make, lines, monkeypatch):
    """The program is stopped as by SIGSTOP: its port accepts connections, but it does not answer."""
    monkeypatch.setattr(supervised, "HEALTH_SECONDS", 0.05)
    answers = iter([True, *[False, True] * 3])  # one miss is no hang

    def is_up() -> bool:
        if psutil.Process(watcher.children["prefect"].process.pid).status() == psutil.STATUS_STOPPED:
            raise TimeoutError
        return next(answers, True)

    watcher = Supervisor([make("prefect", is_up=is_up), make("mlflow")], lines)
    run(watcher, lambda: watcher.answers("prefect", "mlflow") and next(answers, None) is None)
    old = watcher.children["prefect"].process
    assert watcher.children["prefect"].starts == 1, "one that answers is left alone"
    old.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(supervised, "HANG_SECONDS", 0.5)  # not before: two answers can be as far apart
    run(watcher, lambda: watcher.revived == {"prefect"})
    told = [line for line in lines.said if line.startswith("prefect")][2:]
    assert told[0] == "prefect hangs no answer for 0 s" and old.returncode == -signal.SIGKILL
    assert told[-1] == "prefect ready http://here started again" and watcher.children["mlflow"].starts == 1


def test_a_worker_is_not_killed_for_its_silence(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "HANG_SECONDS", 0.0)
    asked: list[bool] = []
    worker = replace(make("worker", is_up=lambda: not asked and not asked.append(True)), shares_session=True)
    watcher, until = Supervisor([worker], lines), time.monotonic() + 1
    run(watcher, lambda: time.monotonic() > until and watcher.answers("worker"))
    assert watcher.children["worker"].starts == 1


def test_one_that_never_answers_ends_the_start_with_the_end_of_its_log(make, lines):
    watcher = Supervisor([make("mlflow", "raise SystemExit('no such database')")], lines)
    with pytest.raises(StartFailed, match=r"(?s)mlflow died .status 1., 2 times.*log:\n.*no such database"):
        run(watcher, lambda: False)


def test_one_that_answers_no_more_after_a_death_is_ended_and_started_again(make, lines, monkeypatch):
    health = [True]
    watcher = Supervisor([make("prefect", is_up=lambda: health[0])], lines)
    run(watcher, lambda: watcher.answers("prefect"))
    monkeypatch.setattr(supervised, "START_SECONDS", 0.5)
    health[0] = False
    watcher.children["prefect"].process.kill()
    run(watcher, lambda: watcher.children["prefect"].starts == 3)
    health[0] = True
    run(watcher, lambda: watcher.answers("prefect"))


def test_one_that_is_silent_from_its_start_on_ends_the_start(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "START_SECONDS", 0.5)

    def is_up() -> bool:
        wait_for(lambda: "here" in program.log_path.read_text(), 30, "a line in the log")
        return False

    program = make("prefect", is_up=is_up)
    watcher = Supervisor([program], lines)
    with pytest.raises(StartFailed, match=r"(?s)prefect did not answer within 0 s; the end of .*here"):
        run(watcher, lambda: False)


def test_children_are_told_to_stop_when_the_one_that_watches_is_killed(tmp_path):
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "from flows.prefect_server.processes import start_process\n"
        "child = start_process([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ, Path(sys.argv[1]))\n"
        "print(child.pid, flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        wait_for(lambda: "flows.service.leash" not in child.cmdline(), 20, "exec")
        parent.kill()
    if sys.platform == "linux":
        wait_for(lambda: not child.is_running(), 20, "end of the child")
    else:
        child.kill()


def test_leftovers_of_a_killed_service_are_ended_and_flow_runs_are_not(tmp_path):
    def start(**marks: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, **marks})

    mine = {SERVICE_VARIABLE: str(tmp_path), PART_VARIABLE: "worker"}
    server, run_of_flow = start(**mine), start(**mine, PREFECT__FLOW_RUN_ID="1")
    other = start(**{SERVICE_VARIABLE: str(tmp_path / "other")})
    try:
        wait_for(lambda: len(service_processes(tmp_path)) == 2, 20, "start")
        assert end_leftovers(tmp_path, 10) == 1
        assert server.wait(at_most(10)) == -signal.SIGTERM and run_of_flow.poll() is None and other.poll() is None
    finally:
        for process in (server, run_of_flow, other):
            process.kill()
            process.wait()


def test_what_a_killed_service_left_is_ended_before_its_ports_are_taken(tmp_path, monkeypatch):
    ports = {"prefect": free_port(), "mlflow": free_port()}
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "ports.json").write_text(json.dumps(ports))
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {ports['prefect']})); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, SERVICE_VARIABLE: str(tmp_path)})
    plans = []
    monkeypatch.setattr(run_service, "_serve", lambda plan, *_: plans.append(plan))
    try:
        wait_for(lambda: not is_free("127.0.0.1", ports["prefect"]), 20, "server")
        assert run_service.run_service(tmp_path, "127.0.0.1", 2, {}) == 0
        assert plans[0].ports == ports and left.wait(at_most(10)) == -signal.SIGTERM
    finally:
        left.kill()


def test_a_long_log_moves_aside_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.prefect_server.processes.MAX_LOG_BYTES", 1000)
    path = tmp_path / "log"
    with path.open("ab") as writer:
        writer.write(b"old\n" * 500)
        writer.flush()
        trim_log(path)
        writer.write(b"new\n\n")
    assert path.read_bytes() == b"new\n\n" and Path(f"{path}.1").stat().st_size == 2000
    assert log_tail(path) == ["new"] and log_tail(tmp_path / "none") == []
