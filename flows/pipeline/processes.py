"""Servers and other programs that this process starts: how they are started, asked, ended, and where they write."""

import contextlib
import http.client
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.shared.launchers.parent import with_parent

SERVICE_VARIABLE = "ATHANOR_SERVICE"  # in every process of a service: the directory of its root's files
ROOT_VARIABLE = "ATHANOR_ROOT"
_TAIL_BYTES = 8_000
_ANSWER_SECONDS = 10.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy on the way to this machine


def server_command(factory: str, host: str, port: int, *options: str) -> list[str]:
    """Return the command of a server whose application a function makes, given as `module:function`."""
    return [sys.executable, "-m", "uvicorn", "--factory", factory, "--host", host, "--port", str(port), *options]


def start_process(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> subprocess.Popen:
    """Start a program in a session of its own. The program gets SIGTERM when this process ends.

    Must be called in the main thread, because Linux sends the signal when the thread that started the child ends.
    """
    with log_path.open("ab") as log:
        return subprocess.Popen(
            with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def end_process(process: subprocess.Popen, seconds: float) -> None:
    """Send SIGTERM to a process, and SIGKILL if it is still running after `seconds`."""
    process.terminate()
    kill_after(process, seconds)


def kill_after(process: subprocess.Popen, seconds: float) -> None:
    """Wait for the end of a process, and kill it after `seconds`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()  # does nothing to a process that has been waited for
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def answer_of(url: str, body: bytes | None = None, headers: Mapping[str, str] = {}) -> bytes | None:
    """Return what a server of this machine answers; None if it does not answer, or not with success."""
    request = urllib.request.Request(url, body, dict(headers))
    try:
        with _OPENER.open(request, timeout=_ANSWER_SECONDS) as answer:
            return answer.read() if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


def begin_log(path: Path) -> None:
    """Rename the log of the last start to `<name>.1`, so that a new log can begin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))


def log_tail(path: Path, lines: int = 8) -> list[str]:
    """Return the last non-empty lines of a log; [] if there is no log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
