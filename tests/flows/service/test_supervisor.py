"""The supervisor, with small programs instead of servers: it starts them in order, restarts dead ones, and ends all."""

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dataset_builders.storage.files import trim_log
from flows.cli import main as command_line
from flows.pipeline.processes import SERVICE_VARIABLE, log_tail
from flows.service import supervisor as supervised
from flows.service.programs import Program
from flows.service.supervisor import StartFailed, StatusLines, Supervisor
from flows.tracking.servers import is_free
from stages.shared.launchers.processes import Owner
from tests.helpers.object_store import free_port
from tests.helpers.patience import at_most
from tests.helpers.service import processes_with, wait_for

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
        environment = {**os.environ, "IN_TEST": str(tmp_path)}
        answers = is_up or (lambda: "here" in log.read_text())
        return Program(name, [sys.executable, "-c", code], environment, log, lambda _: answers(), "http://here")

    yield make
    for process in processes_with("IN_TEST", str(tmp_path)):
        process.kill()


def run(watcher: Supervisor, until: Callable[[], bool], seconds: float = 30) -> None:
    def turn() -> bool:
        watcher.turn()
        return until()

    wait_for(turn, seconds, "end", lambda: str(watcher.lines.said))


def test_programs_are_started_and_told(make, lines):
    watcher = Supervisor([make("prefect"), make("mlflow")], lines)
    run(watcher, lambda: watcher.is_ready("prefect", "mlflow"))
    assert lines.said[:2] == ["prefect starting http://here", "mlflow starting http://here"]
    assert set(lines.said[2:]) == {"prefect ready http://here", "mlflow ready http://here"}


def test_a_dead_one_is_started_again_and_that_is_told(make, lines):
    watcher = Supervisor([make("mlflow")], lines)
    run(watcher, lambda: watcher.is_ready("mlflow"))
    old = watcher.programs["mlflow"].process
    old.kill()
    old.wait()
    (watcher.programs["mlflow"].log_path).write_text("")
    run(watcher, lambda: watcher.programs["mlflow"].starts == 2 and watcher.is_ready("mlflow"))
    assert watcher.programs["mlflow"].process.pid != old.pid
    assert "mlflow waiting died (signal 9); starts again" in lines.said
    assert lines.said[-1] == "mlflow ready http://here started again"


@pytest.mark.parametrize("step", ["start_process", "write_json"])
def test_a_full_disk_is_outlived(make, lines, monkeypatch, step):
    monkeypatch.setattr(supervised, "MAX_BACKOFF_SECONDS", 0.5)
    watcher = Supervisor([make("worker"), make("mlflow")], lines)
    run(watcher, lambda: watcher.is_ready("worker", "mlflow"))
    worker = watcher.programs["worker"]
    is_full, usual = [True], getattr(supervised, step)

    def or_no_space(*arguments):
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(*arguments)

    def no_space(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervised, step, or_no_space)
    monkeypatch.setattr(supervised, "trim_log", no_space)
    worker.process.kill()
    worker.process.wait()
    worker.log_path.write_text("")
    told = f"worker waiting the disk of {worker.log_path} is full; tries again every 0 s"
    run(watcher, lambda: told in lines.said)
    assert worker.process is None and watcher.is_ready("mlflow")
    is_full[0] = False
    run(watcher, lambda: watcher.is_ready("worker", "mlflow"))
    assert worker.starts == 2
    assert len(processes_with("IN_TEST", str(worker.log_path.parent))) == 2


def test_a_line_that_finds_no_room_is_lost_and_a_closed_terminal_is_not_hidden(monkeypatch):
    for number in (errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=partial(fail, number), flush=lambda: None))
        StatusLines().say("ready")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=partial(fail, errno.EPIPE), flush=lambda: None))
    with pytest.raises(BrokenPipeError):
        StatusLines().say("ready")


def fail(number: int, text: str) -> None:
    raise OSError(number, os.strerror(number))


def test_one_that_dies_again_and_again_is_started_less_and_less_often(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "FIRST_TRIES", 99)
    watcher = Supervisor([make("mlflow", "raise SystemExit(3)")], lines)
    run(watcher, lambda: watcher.programs["mlflow"].deaths >= 3)
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
        is_stopped = psutil.Process(watcher.programs["prefect"].process.pid).status() == psutil.STATUS_STOPPED
        return not is_stopped and next(answers, True)

    watcher = Supervisor([make("prefect", is_up=is_up), make("mlflow")], lines)
    run(watcher, lambda: watcher.is_ready("prefect", "mlflow") and next(answers, None) is None)
    old = watcher.programs["prefect"].process
    assert watcher.programs["prefect"].starts == 1, "one that answers is left alone"
    old.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(supervised, "HANG_SECONDS", 0.5)  # not before: two answers can be as far apart
    run(watcher, lambda: watcher.programs["prefect"].starts == 2 and watcher.is_ready("prefect"))
    told = [line for line in lines.said if line.startswith("prefect")][2:]
    assert told[0] == "prefect hangs no answer for 0 s" and old.returncode == -signal.SIGKILL
    assert told[-1] == "prefect ready http://here started again" and watcher.programs["mlflow"].starts == 1


def test_a_worker_without_a_heartbeat_is_told_of_and_not_killed(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "HANG_SECONDS", 0.0)
    monkeypatch.setattr(supervised, "HEALTH_SECONDS", 0.05)
    beats: list[datetime | None] = [None]  # nobody knows it, as while Prefect's server starts again
    worker = replace(make("worker"), heartbeat=lambda: beats[-1])
    watcher, until = Supervisor([worker], lines), time.monotonic() + 1
    run(watcher, lambda: time.monotonic() > until and watcher.is_ready("worker"))
    assert lines.said == ["worker starting http://here", "worker ready http://here"]
    beats.append(datetime(2026, 1, 31, 9, 30, tzinfo=UTC))
    run(watcher, lambda: len(lines.said) == 3)
    pid = watcher.programs["worker"].process.pid
    told = f"worker silent no heartbeat since 2026-01-31 09:30:00 UTC; `kill -CONT {pid}` wakes it, `kill -9 {pid}` "
    assert lines.said[-1].startswith(told)
    beats.append(datetime.now(UTC))
    run(watcher, lambda: len(lines.said) == 4)
    assert lines.said[-1] == "worker ready http://here" and watcher.programs["worker"].starts == 1


def test_one_that_never_answers_ends_the_start_with_the_end_of_its_log(make, lines):
    watcher = Supervisor([make("mlflow", "raise SystemExit('no such database')")], lines)
    with pytest.raises(StartFailed, match=r"(?s)mlflow died .status 1., 2 times.*log:\n.*no such database"):
        run(watcher, lambda: False)


def test_one_that_answers_no_more_after_a_death_is_ended_and_started_again(make, lines, monkeypatch):
    health = [True]
    watcher = Supervisor([make("prefect", is_up=lambda: health[0])], lines)
    run(watcher, lambda: watcher.is_ready("prefect"))
    monkeypatch.setattr(supervised, "START_SECONDS", 0.5)
    health[0] = False
    watcher.programs["prefect"].process.kill()
    run(watcher, lambda: watcher.programs["prefect"].starts == 3)
    health[0] = True
    run(watcher, lambda: watcher.is_ready("prefect"))


def test_one_that_is_silent_from_its_start_on_ends_the_start(make, lines, monkeypatch):
    monkeypatch.setattr(supervised, "START_SECONDS", 0.5)

    def is_up() -> bool:
        wait_for(lambda: "here" in program.log_path.read_text(), 30, "a line in the log")
        return False

    program = make("prefect", is_up=is_up)
    watcher = Supervisor([program], lines)
    with pytest.raises(StartFailed, match=r"(?s)prefect did not answer within 0 s; the end of .*here"):
        run(watcher, lambda: False)


# A service of three programs. The worker has a flow run that needs a second to save, and ignores a second SIGTERM.
SERVICE = """
import os, sys, time
from pathlib import Path
from flows.service import supervisor
from flows.service.programs import Program

FLOW_RUN = '''
import signal, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)
    open(sys.argv[1] + "/saved", "w").close()
    helper.kill()
    helper.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + "/runs", "w").close()
time.sleep(600)
'''
WORKER = f'''
import os, subprocess, sys, time
from stages.shared.launchers.parent import with_parent
subprocess.Popen(with_parent([sys.executable, "-c", {FLOW_RUN!r}, sys.argv[1]]), start_new_session=True)
time.sleep(600)
'''
place = Path(sys.argv[1])


def program(name, code):
    def answers(_):
        return (place / "runs").exists()
    return Program(name, [sys.executable, "-c", code, str(place)], os.environ, place / f"{name}.log", answers, "here")


names = {"prefect": "import time; time.sleep(600)", "mlflow": "import time; time.sleep(600)", "worker": WORKER}
service = supervisor.Supervisor([program(*each) for each in names.items()], supervisor.StatusLines())
supervisor.adopt_orphans()
with supervisor.stop_signals() as stop:
    try:
        service.turn_until(lambda: stop.times)
    finally:
        service.end(stop)
"""


@pytest.fixture
def service(tmp_path) -> Iterator[subprocess.Popen]:
    """Start the service, and wait until its flow run runs."""
    environment = {**os.environ, "IN_TEST": str(tmp_path)}
    command = [sys.executable, "-c", SERVICE, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for((tmp_path / "runs").exists, 60, "flow run")
            yield process
        finally:
            process.kill()
    wait_for(lambda: not processes_with("IN_TEST", str(tmp_path)), 20, "end of every process")


def owner_of(path: Path) -> Owner:
    return Owner.model_validate_json(path.read_bytes())


def test_a_signal_ends_everything_after_the_flow_runs_have_saved(service, tmp_path):
    service.send_signal(signal.SIGINT)
    said = [" ".join(line.split()) for line in service.communicate(timeout=at_most(60))[0].splitlines()]
    assert service.returncode == 0 and (tmp_path / "saved").exists()
    assert not processes_with("IN_TEST", str(tmp_path)) and not list(tmp_path.glob("*.pid"))
    saving = said.index("worker stopping flow runs stop and save (1); Ctrl-C again does not wait")
    assert [line for line in said[saving:] if "flow runs stop" not in line] == [
        *("worker stopping", "worker stopped", "mlflow stopping", "prefect stopping"),
        *("mlflow stopped", "prefect stopped"),
    ]


def test_a_second_signal_ends_everything_at_once(service, tmp_path):
    service.send_signal(signal.SIGINT)
    wait_for(lambda: "save (1)" in service.stdout.readline(), 20, "line")
    service.send_signal(signal.SIGINT)
    assert service.wait(at_most(60)) == 0
    assert not (tmp_path / "saved").exists() and not processes_with("IN_TEST", str(tmp_path))


@pytest.mark.parametrize("part", ["service", "worker"])
def test_the_kernel_lets_flow_runs_save_if_a_process_above_them_is_killed(service, tmp_path, part):
    """The worker of this test does not end its flow runs at SIGTERM, as Prefect's does."""
    os.kill(service.pid if part == "service" else owner_of(tmp_path / "worker.pid").pid, signal.SIGKILL)
    wait_for((tmp_path / "saved").exists, 20, "end of the flow run")
    if part == "worker":
        wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 3 and service.poll() is None, 20, "the others")
        service.send_signal(signal.SIGTERM)
        assert service.wait(at_most(60)) == 0


def test_what_a_killed_service_left_is_ended_before_its_ports_are_taken(tmp_path, monkeypatch):
    """A server that does not react to the SIGTERM that it got when its parent was killed."""
    directory = tmp_path / "service"
    directory.mkdir()
    ports = {"prefect": free_port(), "mlflow": free_port()}
    (directory / "ports.json").write_text(json.dumps(ports))
    (directory / "mlflow.pid").write_text('{"pid": ')  # its writer was killed
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {ports['prefect']})); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, SERVICE_VARIABLE: str(tmp_path)})
    born = psutil.Process(left.pid).create_time()
    owner = Owner(pid=left.pid, pid_started=born, host=socket.gethostname())
    (directory / "prefect.pid").write_text(owner.model_dump_json())
    (directory / "worker.pid").write_text(owner.model_copy(update={"pid_started": 1.0}).model_dump_json())
    services = []
    monkeypatch.setattr(supervised, "LEFTOVER_SECONDS", 0.5)
    monkeypatch.setattr(supervised, "_serve", lambda service, *_: services.append(service))
    try:
        wait_for(lambda: not is_free("127.0.0.1", ports["prefect"]), 20, "server")
        assert supervised.run_service(tmp_path, "127.0.0.1", 2, {}) == 0
        assert services[0].ports == ports and left.wait(at_most(10)) == -signal.SIGKILL
    finally:
        left.kill()


def test_a_copy_of_a_served_root_leaves_the_programs_of_the_original_alone(tmp_path):
    (tmp_path / "service").mkdir()
    code = "print(flush=True); import time; time.sleep(600)"
    environment = {**os.environ, SERVICE_VARIABLE: str(tmp_path.with_name("original"))}
    program = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        program.stdout.readline()
        born = psutil.Process(program.pid).create_time()
        owner = Owner(pid=program.pid, pid_started=born, host=socket.gethostname())
        (tmp_path / "service" / "mlflow.pid").write_text(owner.model_dump_json())  # as `cp -a` has left it
        assert supervised.end_leftovers(tmp_path / "service", seconds=0.1) == 0 and program.poll() is None
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_a_long_log_moves_aside_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset_builders.storage.files.MAX_LOG_BYTES", 1000)
    path = tmp_path / "log"
    with path.open("ab") as writer:
        writer.write(b"old\n" * 500)
        writer.flush()
        trim_log(path)
        writer.write(b"new\n\n")
    assert path.read_bytes() == b"new\n\n" and Path(f"{path}.1").stat().st_size == 2000
    assert log_tail(path) == ["new"] and log_tail(tmp_path / "none") == []


def test_the_logs_of_the_newest_runs_stay_and_a_long_one_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "_KEPT_LOGS", 3)
    monkeypatch.setattr(command_line, "MAX_LOG_BYTES", 1000)
    (tmp_path / "logs").mkdir()
    for number in range(5):
        path = tmp_path / "logs" / f"run-20260101-00000{number}-1.log"
        path.touch()
        os.utime(path, (5 - number,) * 2)  # the first is the one that is still written
    log = command_line._log_to_file(tmp_path)
    for number in range(30):
        logging.getLogger("athanor").info("%0100d", number)
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert names == {"run-20260101-000000-1.log", "run-20260101-000001-1.log", log.name, f"{log.name}.1"}
    assert max(path.stat().st_size for path in (tmp_path / "logs").iterdir()) <= 1000
    assert log.read_text().rstrip().endswith("29")
