"""Prefect's temporary server for a run without a service: a child process that ends with this process.

Prefect would start such a server by itself. But Prefect would first import its whole server into this process too,
which takes two more seconds, and it would leave the server running after a kill -9. The command is Prefect's own
(prefect/server/api/server.py, SubprocessASGIServer), with the guard in front of it and a password of its own, because
every user of the machine can reach loopback.

A new PREFECT_HOME has no tables. The first server makes them in about three seconds of CPU time. It does so under a
lock, because two servers that make them at the same time would ruin the database. The empty file
<PREFECT_HOME>/schema-<version> marks that the tables are made.
"""

import atexit
import contextlib
import importlib.metadata
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import psutil
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

from flows.pipeline.processes import answer_of, begin_log, end_process, log_tail, server_command, start_process
from flows.tracking.servers import (
    NAMES_VARIABLE,
    PREFECT_CLIENT_SECRET,
    PREFECT_SECRET,
    SCHEMA_LOCK,
    any_port,
    check_prefect_database,
    is_free,
    past_the_proxy,
)
from stages.shared.launchers.processes import JOB_VARIABLE, end_processes
from trainer.contract.names import EXIT_FAILED

HOST = "127.0.0.1"
LOG = "temporary-server.log"
_CANNOT_LISTEN = 3  # exit status of uvicorn if it cannot listen, and also if the application fails
_TRIES = 3
_TURN_SECONDS = 0.05
_END_SECONDS = 30.0  # a server that is making its tables must finish that first
LOOK_SECONDS = 1.0  # between two looks whether the server runs
HANG_SECONDS = 60.0  # silence after which it hangs; on a machine at load 20 single answers take over ten seconds
HEALTH_SECONDS = 10.0  # between two questions whether it answers
_LOCK_SECONDS = 300.0  # a first start on a loaded laptop takes a minute
log = logging.getLogger("athanor.pipeline")
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


@dataclass(slots=True)
class TemporaryServer:
    """The temporary server of this process. `begin` starts it early, and `wait` returns when it answers."""

    home: Path
    process: subprocess.Popen | None = None
    port: int = 0
    login: str = field(default_factory=lambda: f"athanor:{secrets.token_urlsafe(24)}", repr=False)

    @property
    def api(self) -> str:
        """The value for PREFECT_API_URL."""
        return f"http://{HOST}:{self.port}/api"

    def begin(self) -> None:
        """Start the server if it is not running. Must be called in the main thread, since the server ends with it.

        A server that has died is restarted at its old port if that is free, because Prefect's event thread keeps using
        the old address.
        """
        if self.process is not None and self.process.poll() is None:
            return
        if not (self.port and is_free(HOST, self.port)):
            self.port = any_port(HOST)
        begin_log(self.home / LOG)
        inherited = {name: value for name, value in os.environ.items() if name != PREFECT_CLIENT_SECRET}
        own = {"PREFECT_HOME": str(self.home), PREFECT_SECRET: self.login, NAMES_VARIABLE: HOST}
        environment = {**inherited, **_ENVIRONMENT, **own}
        options = ("--lifespan", "on", "--log-level", "error")
        command = server_command("flows.service.prefect_app:make_app", HOST, self.port, *options)
        self.process = start_process(command, environment, self.home / LOG)

    def wait(self) -> None:
        """Return when the server answers. Start it again if another program has taken its port.

        The port may be free again at the second start, because the connection of a client occupies any free port for
        milliseconds.

        Raises:
            InputError: its database is ruined or cannot be written.
            RuntimeError: the server ended by itself or is too slow; the message has the end of its log.
        """
        seconds = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        deadline, starts = time.monotonic() + seconds, 1
        while answer_of(f"{self.api}/health") is None:
            if (status := self.process.poll()) is not None:
                check_prefect_database(self.home)
                if status != _CANNOT_LISTEN or starts == _TRIES:
                    raise RuntimeError(f"Prefect's temporary server ended: {self._last_words()}, exit status {status}")
                self.begin()
                starts += 1
            if time.monotonic() > deadline:
                raise RuntimeError(f"Prefect's temporary server was not up after {seconds} s: {self._last_words()}")
            time.sleep(_TURN_SECONDS)

    def start(self) -> None:
        """Start the server and return when it answers. From then on every thread of this process uses it; child
        processes do not."""
        self.begin()
        self.wait()
        os.environ.update(past_the_proxy())
        before = {name: os.environ.get(name) for name in ("PREFECT_API_URL", PREFECT_CLIENT_SECRET)}
        os.environ.update({"PREFECT_API_URL": self.api, PREFECT_CLIENT_SECRET: self.login})
        refresh_global_settings_context()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    def end(self) -> None:
        """Stop the server and wait for its end."""
        if self.process is not None:
            end_process(self.process, _END_SECONDS)

    def _last_words(self) -> str:
        lines = log_tail(self.home / LOG, 1)
        return f"{lines[0].strip() if lines else 'its log is empty'} (log: {self.home / LOG})"


def start_early() -> None:
    """Begin to start the server while this process is still importing its libraries. `start_prefect` waits for it.

    Nothing happens if the tables are not made yet. Otherwise the report of a typing error would have to wait until they
    are made.
    """
    if PREFECT_API_URL.value() is None and _marker(PREFECT_HOME.value()).exists():
        server_of(PREFECT_HOME.value()).begin()


def start_prefect() -> None:
    """Start the temporary server, and return when it answers and has its tables.

    Nothing happens if the address of another server is set.
    """
    if PREFECT_API_URL.value() is not None and not is_temporary():
        return
    home = PREFECT_HOME.value()
    if _marker(home).exists():
        server_of(home).start()
        return
    home.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(home / SCHEMA_LOCK, timeout=_LOCK_SECONDS):
        server_of(home).start()
        _marker(home).touch()


def _marker(home: Path) -> Path:
    return home / f"schema-{importlib.metadata.version('prefect')}"


_servers: dict[Path, TemporaryServer] = {}


def server_of(home: Path) -> TemporaryServer:
    """Return the temporary server of a PREFECT_HOME. It ends with this process."""
    if home not in _servers:
        _servers[home] = TemporaryServer(home)
        atexit.register(_servers[home].end)
    return _servers[home]


def is_temporary() -> bool:
    """Whether Prefect uses a temporary server of this process."""
    return PREFECT_API_URL.value() in [server.api for server in _servers.values()]


@contextlib.contextmanager
def ends_with_server(grace_seconds: float, close: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End this process with a line if its temporary server dies or hangs while the block lasts; do nothing if it has
    none.

    Prefect's client repeats each call to such a server for minutes, and no signal interrupts that. So the process does
    not end as after other errors: its trainings save, and then it exits at once, like one that is killed.

    Args:
        grace_seconds: time for trainings to save.
        close: called before the line is printed.
    """
    ended = threading.Event()
    if is_temporary():
        arguments = (server_of(PREFECT_HOME.value()), ended, grace_seconds, close)
        threading.Thread(target=_end_with, args=arguments, name="temporary-server", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _end_with(server: TemporaryServer, ended: threading.Event, grace_seconds: float, close: Callable[[], None]) -> None:
    why = _trouble(server, ended)
    if not why:
        return
    line = (
        f"Prefect's temporary server (process {server.process.pid}) {why}, so the run ends; the same command resumes "
        f"from the finished work (log of the server: {server.home / LOG})"
    )
    if log.hasHandlers():  # the log file of the run; without one, logging would print the line a second time
        log.error("%s", line)
    server.process.kill()
    end_processes(_jobs(), grace_seconds)
    close()
    print(f"athanor: {line}", file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def _trouble(server: TemporaryServer, ended: threading.Event) -> str:
    """Wait until something is wrong with a server, and return what; return an empty text if the event comes first."""
    answered = asked = time.monotonic()
    was_stopped = False
    while not ended.wait(LOOK_SECONDS):
        if (status := server.process.poll()) is not None:
            return f"was killed (signal {-status})" if status < 0 else f"ended (status {status})"
        with contextlib.suppress(psutil.Error):
            is_stopped = psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED
            if is_stopped and was_stopped:
                return f"is stopped ({signal.SIGSTOP.name})"
            was_stopped = is_stopped
        if time.monotonic() - asked > HEALTH_SECONDS:
            asked = time.monotonic()
            if answer_of(f"{server.api}/health") is not None:
                answered = time.monotonic()
            elif time.monotonic() - answered > HANG_SECONDS:
                return f"has not answered for {HANG_SECONDS:.0f} s"
    return ""


def _jobs() -> list[psutil.Process]:
    """Return the trainings and other jobs below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if JOB_VARIABLE in process.environ():
                found.append(process)
    return found
