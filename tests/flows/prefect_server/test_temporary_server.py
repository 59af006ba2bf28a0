"""Prefect's server of a run without a service: every thread finds it, it ends with its process, and it has its own
port."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import flows  # noqa: F401  sets what Prefect reads at its import

# isort: split
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from dataset_builders.errors import InputError
from flows.pipeline import temporary_server
from flows.pipeline.limits import has_server
from flows.pipeline.temporary_server import TemporaryServer, is_temporary, server_of, start_early, start_prefect
from stages.shared.launchers.processes import runs
from tests.helpers.patience import at_most
from tests.helpers.service import clean_environment, processes_with, wait_for
from tests.test_architecture import ROOT

RUN = """
import sys
import flows
from flows.pipeline.temporary_server import start_early, start_prefect
start_early()
start_prefect()
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    client.create_flow_from_name("asked")
assert "prefect.server.api.server" not in sys.modules, "loads for two seconds"
from flows.pipeline.temporary_server import server_of
from prefect.settings import PREFECT_HOME
print(server_of(PREFECT_HOME.value()).process.pid, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> TemporaryServer:
    start_early()
    start_prefect()
    return server_of(PREFECT_HOME.value())


def started(home: Path, code: str = RUN) -> subprocess.Popen:
    """Start another process with a server of its own. The process prints the server's pid."""
    environment = {**clean_environment(), "PREFECT_HOME": str(home)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def flows_of(home: Path) -> list[tuple[str]]:
    with sqlite3.connect(home / "prefect.db") as database:
        return database.execute("SELECT name FROM flow").fetchall()


def test_every_thread_of_the_process_and_no_child_is_told_of_it(server):
    told = []
    thread = threading.Thread(target=lambda: told.append(PREFECT_API_URL.value()))
    thread.start()
    thread.join()
    assert told == [server.api] and PREFECT_API_URL.value() == server.api
    assert "PREFECT_API_URL" not in os.environ
    with get_client(sync_client=True) as client:
        assert client.api_healthcheck() is None


def test_it_is_nobody_elses_so_no_slots_are_asked_for(server):
    assert is_temporary() and not has_server()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        assert not is_temporary() and has_server()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/admin/version", {}, 401),
        ("/admin/version", {"Authorization": "Basic YXRoYW5vcjp4"}, 401),
        ("/health", {"Origin": "http://127.0.0.1:1"}, 403),
        ("/health", {"Host": "evil.example"}, 400),
    ],
)
def test_it_answers_its_process_alone(server, path, headers, status):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server.api + path, headers=headers), timeout=at_most(30))
    assert refused.value.code == status
    assert "PREFECT_API_AUTH_STRING" not in os.environ and server.login not in repr(server)


def test_a_second_start_uses_the_one_that_runs(server):
    before = server.process.pid
    start_early()
    start_prefect()
    assert server.process.pid == before


@pytest.mark.full
def test_a_server_that_has_died_is_started_again(server):
    psutil.Process(server.process.pid).kill()
    server.process.wait()
    before, port = server.process.pid, server.port
    start_prefect()
    assert server.process.pid != before and server.port == port
    with get_client(sync_client=True) as client:
        assert client.api_healthcheck() is None


@pytest.mark.full
def test_a_port_that_somebody_took_meanwhile_is_given_up(server, monkeypatch):
    with socket.socket() as other:
        other.bind((temporary_server.HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = iter([taken])
        free = temporary_server.any_port
        monkeypatch.setattr(temporary_server, "any_port", lambda host: next(ports, None) or free(host))
        home = PREFECT_HOME.value()
        second = TemporaryServer(home)
        other.settimeout(0.1)
        second.begin()
        assert second.port == taken
        with pytest.MonkeyPatch.context() as patch:  # whoever took it does not answer as Prefect does
            answer_of = temporary_server.answer_of
            patch.setattr(temporary_server, "answer_of", lambda url: None if f":{taken}/" in url else answer_of(url))
            second.wait()
        try:
            assert second.port != taken
        finally:
            second.end()


def test_one_that_never_gets_its_port_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary_server, "start_process", lambda *_: subprocess.Popen(["sh", "-c", "exit 3"]))
    server = TemporaryServer(tmp_path)
    server.begin()
    with pytest.raises(RuntimeError, match=r"ended: its log is empty .*, exit status 3"):
        server.wait()


@pytest.mark.full
def test_one_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense")
    broken = TemporaryServer(tmp_path)
    broken.begin()
    with pytest.raises(RuntimeError, match=r"ended: .*Could not parse SQLAlchemy URL.* \(log: .*\.log\)"):
        broken.wait()


def test_a_ruined_database_is_named_at_the_first_end_of_its_server(tmp_path):
    (tmp_path / "prefect.db").write_bytes(os.urandom(20_000))
    server = TemporaryServer(tmp_path, subprocess.Popen(["false"]))
    server.process.wait()
    with pytest.raises(InputError, match=f"{tmp_path}/prefect.db is no whole SQLite database .*; put a copy"):
        server.wait()


# A run with a training that needs half a second to save. The server is a program that does nothing.
WATCHED = """
import os, subprocess, sys, time
import flows
from flows.pipeline import temporary_server as module
from prefect.settings import PREFECT_HOME
TRAINING = '''
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    open("saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open("trains", "w").close()
time.sleep(600)
'''
home = PREFECT_HOME.value()
module._servers[home] = module.TemporaryServer(home, subprocess.Popen(["sleep", "600"]))
module.is_temporary = lambda: True
module.answer_of = lambda url: None if SILENT else b""
module.HEALTH_SECONDS, module.HANG_SECONDS = 0.1, 0.5 if SILENT else 60
print(module._servers[home].process.pid, flush=True)
subprocess.Popen([sys.executable, "-c", TRAINING], env={**os.environ, "ATHANOR_JOB": "train"})
with module.ends_with_server(60, lambda: print("closed", flush=True)):
    try:
        time.sleep(600)
    finally:
        time.sleep(600)  # as Prefect's client, which tries again and again
"""


@pytest.mark.parametrize(
    ("signum", "why"),
    [
        (signal.SIGKILL, r"was killed \(signal 9\)"),
        (signal.SIGSTOP, r"is stopped \(SIGSTOP\)"),
        (None, "has not answered for 0 s"),
    ],
    ids=["kill -9", "stop", "silent"],
)
def test_a_run_whose_server_is_gone_saves_and_ends_with_one_line(tmp_path, signum, why):
    code = f"SILENT = {signum is None}\n{WATCHED}"
    environment = {**clean_environment(), "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path, **pipes) as run:
        try:
            server = psutil.Process(int(run.stdout.readline()))
            if signum is not None:
                wait_for((tmp_path / "trains").exists, 60, "training")
                server.send_signal(signum)
                run.send_signal(signal.SIGINT)  # Ctrl-C, which such a run did not obey
            printed, errors = run.communicate(timeout=at_most(30))
        finally:
            run.kill()
    assert run.returncode == 1 and printed == "closed\n"
    line = rf"athanor: Prefect's temporary server \(process {server.pid}\) {why}, so the run ends; the same command .*"
    assert re.fullmatch(line + r"\n", errors) and not runs(server)
    assert (tmp_path / "saved").exists() or signum is None


def test_a_server_that_is_set_is_left_alone(monkeypatch):
    monkeypatch.setattr(temporary_server, "server_of", lambda home: pytest.fail("started"))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        start_prefect()


@pytest.mark.full
def test_runs_that_start_on_a_fresh_root_at_once_make_its_tables_one_after_the_other(tmp_path):
    """Each server ends with its own process, whether the process ends normally or by kill -9."""
    home = tmp_path / "home"
    ending, living = processes = started(home), started(home, RUN + "import time\ntime.sleep(600)\n")
    try:
        its_own, others = servers = [int(process.stdout.readline()) for process in processes]
        assert len(set(servers)) == 2 and flows_of(home) == [("asked",)]
        assert ending.wait(at_most(120)) == 0
        wait_for(lambda: not psutil.pid_exists(its_own), 10, "end of the server with its process")
        assert psutil.pid_exists(others)
    finally:
        living.kill()
        living.wait()
    wait_for(lambda: not psutil.pid_exists(others), 20, "end of the server when its process is killed")


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "ctrl-c"])
def test_a_first_start_that_is_interrupted_leaves_whole_tables(tmp_path, signum):
    home = tmp_path / "home"
    process = started(home)
    wait_for(lambda: (home / "prefect.db").exists() and (home / "prefect.db").stat().st_size, 60, "first tables")
    process.send_signal(signum)
    process.wait(at_most(60))
    wait_for(lambda: not processes_with("PREFECT_HOME", str(home)), 60, "end of the server")
    if list(home.glob("schema-*")):  # the tables were made before the signal arrived
        assert flows_of(home) in ([], [("asked",)])
    assert started(home).wait(at_most(120)) == 0 and flows_of(home) == [("asked",)]
