"""Modules that a fork server runs as `python -m` would, and the handle for the process that asked for it."""

import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.helpers.patience import at_most


class Started:
    """A process that the fork server started. It is not a child of this process, so its exit status comes from a file.

    Attributes:
        pid: pid of the process, which leads a session and a process group of its own.
    """

    def __init__(self, pid: int, status: Path) -> None:
        self.pid, self._status = pid, status

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal's number if a signal ended the process; None while it is
        running."""
        text = self._status.read_text() if self._status.exists() else ""
        return int(text) if text.endswith("\n") else None

    def wait(self, timeout: float = 240) -> int:
        """Wait for the end and return the exit status.

        Args:
            timeout: seconds on a quick machine, see `at_most`.

        Raises:
            subprocess.TimeoutExpired: the process is still running.
        """
        stop = time.monotonic() + at_most(timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > stop:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_KEEPERS: list[int] = []


def start_module(
    module: str,
    arguments: list[str],
    log: str,
    status: str,
    environment: dict[str, str],
    max_file_bytes: int | None,
) -> int:
    """Fork a process that runs the module, and a second process that writes its exit status into a file.

    Returns:
        the pid of the first process.
    """
    _KEEPERS[:] = [keeper for keeper in _KEEPERS if os.waitpid(keeper, os.WNOHANG) == (0, 0)]
    read, write = os.pipe()
    keeper = os.fork()
    if keeper:
        _KEEPERS.append(keeper)
        os.close(write)
        with os.fdopen(read) as pipe:
            return int(pipe.read())
    try:
        pid = os.fork()
        if pid == 0:
            os.close(write)
            _run(module, arguments, log, environment, max_file_bytes)
        os.write(write, str(pid).encode())
        os.close(write)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        Path(f"{status}.part").write_text(f"{code}\n")
        os.replace(f"{status}.part", status)
    finally:
        os._exit(0)


def _run(module: str, arguments: list[str], log: str, environment: dict[str, str], max_file_bytes: int | None) -> None:
    """Become the process of the module. Never returns."""
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environment)
        if max_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        sys.argv[1:] = arguments
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
