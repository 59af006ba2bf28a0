"""Prefect's server for a run without a service: a process of this one's that ends with it.

Prefect would start such a server by itself, but only once its whole server is loaded into this process too: two seconds
more, in which nothing else is done. The command is Prefect's own (prefect/server/api/server.py, SubprocessASGIServer).
"""

import atexit
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

from flows.service.access import PREFECT_CLIENT_SECRET, PREFECT_SECRET, past_the_proxy
from flows.service.ports import any_port, is_free
from flows.service.processes import begin_log, end_process, log_tail, start_process

HOST = "127.0.0.1"
LOG = "temporary-server.log"
_CANNOT_LISTEN = 3  # uvicorn's exit status
_TURN_SECONDS = 0.05
_END_SECONDS = 5.0
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(slots=True)
class TemporaryServer:
    """The server of this process; `begin` it early, `wait` until it answers."""

    home: Path
    process: subprocess.Popen | None = None
    port: int = 0

    @property
    def api(self) -> str:
        """For PREFECT_API_URL."""
        return f"http://{HOST}:{self.port}/api"

    def begin(self) -> None:
        """Start it, where it does not run. Must be called in the main thread, to whose life its own is tied."""
        if self.process is not None and self.process.poll() is None:
            return
        self.port = any_port(HOST)
        begin_log(self.home / LOG)
        inherited = {k: v for k, v in os.environ.items() if k not in (PREFECT_SECRET, PREFECT_CLIENT_SECRET)}
        environment = {**inherited, **_ENVIRONMENT, "PREFECT_HOME": str(self.home)}
        app = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
        place = ["--host", HOST, "--port", str(self.port), "--log-level", "error"]
        self.process = start_process([sys.executable, "-m", "uvicorn", *app, *place], environment, self.home / LOG)

    def wait(self) -> None:
        """Return when it answers; another port is tried where somebody was quicker to take it.

        Raises:
            RuntimeError: it ends by itself, or is too slow; with the end of its log.
        """
        seconds = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        deadline = time.monotonic() + seconds
        while not self._answers():
            if self.process.poll() is not None:
                if not self._was_too_late():
                    raise RuntimeError(f"Prefect's temporary server ended: {self._last_words()}")
                self.begin()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Prefect's temporary server was not up after {seconds} s: {self._last_words()}")
            time.sleep(_TURN_SECONDS)

    def end(self) -> None:
        """Tell it to stop, and wait."""
        if self.process is not None:
            end_process(self.process, _END_SECONDS)

    def _answers(self) -> bool:
        try:
            with _OPENER.open(f"{self.api}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _was_too_late(self) -> bool:
        """Whether somebody else has its port."""
        return self.process.returncode == _CANNOT_LISTEN and not is_free(HOST, self.port)

    def _last_words(self) -> str:
        said = log_tail(self.home / LOG, 1)
        return f"{said[0].strip() if said else 'it said nothing'} (log: {self.home / LOG})"


_servers: dict[Path, TemporaryServer] = {}


def server_of(home: Path) -> TemporaryServer:
    """The one of a PREFECT_HOME; it is ended with this process."""
    if home not in _servers:
        _servers[home] = TemporaryServer(home)
        atexit.register(_servers[home].end)
    return _servers[home]


def use(server: TemporaryServer) -> None:
    """Let Prefect talk to it, in every thread of this process; its children are not told."""
    os.environ.update({"PREFECT_API_URL": server.api, **past_the_proxy()})
    refresh_global_settings_context()
    del os.environ["PREFECT_API_URL"]


def is_temporary() -> bool:
    """Whether the server that Prefect uses is one of this process."""
    return PREFECT_API_URL.value() in [server.api for server in _servers.values()]
