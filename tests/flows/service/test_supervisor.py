"""The one that watches, with small programs in the place of servers: started in order, again after a death, ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from flows.service import supervisor as supervised
from flows.service.processes import PART_VARIABLE, SERVICE_VARIABLE, end_leftovers, log_tail, marked_processes, trim_log
from flows.service.programs import Program
from flows.service.status_lines import LiveLines, PrintedLines
from flows.service.supervisor import StartFailed, Supervisor
from tests.helpers.service import wait_for

LASTING = "import time; print('here', flush=True); time.sleep(600)"


class Kept(PrintedLines):
    """Lines in a list."""

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
    """A program from Python text; it answers once it has printed, and while `is_up` says so."""

    def make(name: str, code: str = LASTING, is_up: Callable[[], bool] | None = None, **more: object) -> Program:
        log = tmp_path / f"{name}.log"
        environment = {**os.environ, SERVICE_VARIABLE: str(tmp_path), PART_VARIABLE: name}
        answers = is_up or (lambda: "here" in log.read_text())
        return Program(name, [sys.executable, "-c", code], environment, log, lambda _: answers(), **more)

    yield make
    for process in marked_processes(tmp_path):
        process.kill()


def run(watcher: Supervisor, until: Callable[[], bool], seconds: float = 30) -> None:
    def turn() -> bool:
        watcher.turn()
        return until()

    wait_for(turn, seconds, "end", lambda: str(watcher.lines.said))


def test_a_program_waits_for_the_one_it_needs(make, lines):
    watcher = Supervisor([make("worker", needs="prefect"), make("prefect")], lines, print)
    run(watcher, lambda: watcher.is_ready)
    assert lines.said[0] == "worker waiting for prefect"
    assert lines.said.index("prefect ready") < lines.said.index("worker starting")
    for name in ("worker", "prefect"):
        watcher.ask_to_end(name)
        watcher.end(name)
        assert watcher.children[name].process.poll() is not None
    assert lines.said[-1] == "prefect stopped"


def test_a_dead_one_is_started_again_and_that_is_told_once(make, lines):
    told = []
    watcher = Supervisor([make("mlflow")], lines, told.append)
    run(watcher, lambda: watcher.is_ready)
    old = watcher.children["mlflow"].process
    old.kill()
    old.wait()
    (watcher.children["mlflow"].program.log_path).write_text("")
    run(watcher, lambda: told == ["mlflow"])
    assert watcher.children["mlflow"].process.pid != old.pid
    assert "mlflow waiting died (signal 9); starts again" in lines.said
    assert lines.said[-1] == "mlflow ready started again"


def test_one_that_dies_again_and_again_is_started_less_and_less_often(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "FIRST_TRIES", 99)
    watcher = Supervisor([make("mlflow", "raise SystemExit(3)")], lines, print)
    run(watcher, lambda: watcher.children["mlflow"].deaths >= 3)
    assert [line for line in lines.said if "died" in line] == [
        "mlflow waiting died (status 3); starts again",
        "mlflow waiting died (status 3); starts again in 1 s",
        "mlflow waiting died (status 3); starts again in 3 s",
    ]


def test_one_that_never_answers_ends_the_start_with_the_end_of_its_log(make, lines):
    watcher = Supervisor([make("mlflow", "raise SystemExit('no such database')")], lines, print)
    with pytest.raises(StartFailed, match=r"(?s)mlflow ended with status 1, 2 times.*log:\n.*no such database"):
        run(watcher, lambda: False)


def test_one_that_lives_and_answers_no_more_is_started_again(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(supervised, "ASK_SECONDS", 0.1)
    health = [True]
    watcher = Supervisor([make("prefect", is_up=lambda: health[0])], lines, print)
    run(watcher, lambda: watcher.is_ready)
    first, health[0] = watcher.children["prefect"].process.pid, False
    run(watcher, lambda: watcher.children["prefect"].state == "waiting")
    health[0] = True
    run(watcher, lambda: watcher.is_ready)
    assert watcher.children["prefect"].process.pid != first and "prefect silent" in lines.said


def test_a_worker_is_not_blamed_for_a_server_that_is_away(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(supervised, "ASK_SECONDS", 0.1)
    health = [True]
    programs = [make("prefect", is_up=lambda: health[0]), make("worker", needs="prefect", is_up=lambda: health[0])]
    watcher = Supervisor(programs, lines, print)
    run(watcher, lambda: watcher.is_ready)
    worker, health[0] = watcher.children["worker"].process, False
    run(watcher, lambda: watcher.children["prefect"].state == "waiting")
    health[0] = True
    run(watcher, lambda: watcher.is_ready)
    assert watcher.children["worker"].process is worker and worker.poll() is None


def test_work_that_is_asked_for_while_it_runs_is_done_again_after(make, lines, tmp_path):
    code = f"open({str(tmp_path / 'count')!r}, 'a').write('x'); print('done')"
    program = make("deployments", code, lasts=False)
    watcher = Supervisor([program], lines, print)
    watcher.turn()
    watcher.add(program)
    watcher.add(program)
    run(watcher, lambda: watcher.is_ready and (tmp_path / "count").read_text() == "xx")
    assert lines.said[-1] == "deployments registered done"


def test_work_that_fails_is_told_and_stops_nothing(make, lines):
    watcher = Supervisor([make("deployments", "print('bad limit'); raise SystemExit(2)", lasts=False)], lines, print)
    run(watcher, lambda: watcher.is_ready)
    assert any(line.startswith("deployments failed status 2: bad limit (log: ") for line in lines.said)


def test_children_are_told_to_stop_when_the_one_that_watches_is_killed(tmp_path):
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom flows.service.processes import start_process\n"
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
        wait_for(lambda: len(marked_processes(tmp_path)) == 2, 20, "start")
        assert end_leftovers(tmp_path, 10) == 1
        assert server.wait(10) == -signal.SIGTERM and run_of_flow.poll() is None and other.poll() is None
    finally:
        for process in (server, run_of_flow, other):
            process.kill()
            process.wait()


def test_a_long_log_moves_aside_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.service.processes.MAX_LOG_BYTES", 1000)
    path = tmp_path / "log"
    with path.open("ab") as writer:
        writer.write(b"old\n" * 500)
        writer.flush()
        trim_log(path)
        writer.write(b"new\n\n")
    assert path.read_bytes() == b"new\n\n" and Path(f"{path}.1").stat().st_size == 2000
    assert log_tail(path) == ["new"] and log_tail(tmp_path / "none") == []


def test_on_a_terminal_the_lines_stay_in_their_places():
    shown = LiveLines(Console(file=StringIO(), force_terminal=True, width=80))
    shown.show("prefect", "starting", "http://[::1]:4200")
    shown.show("mlflow", "starting", "")
    shown.show("prefect", "ready", "http://[::1]:4200")
    shown.close()
    text = shown._live.console.file.getvalue()
    assert "http://[::1]:4200" in text
    last = text.rsplit("prefect", 1)[1]
    assert "ready" in last and "mlflow" in last  # the line above was written again, with the one below it
