"""The processes of chat templates, quickly: a server that has imported transformers forks each of them.

Such a process takes a second to import transformers, and hundreds of tests need one. A fork runs the same program with
the same limits. tests/stages/shared/chat_format/test_template.py starts the program as the product does, too.
"""

import atexit
import contextlib
import functools
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from tests.helpers.process_dir import process_dir

_ROOT = Path(__file__).parents[2]
_NUMBER = struct.Struct("i")


class Forked:
    """A fork of the server, with the part of subprocess.Popen that a ChatTemplate uses. Its arguments are ignored."""

    def __init__(self, *_: object, **__: object) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_server())
        (its_input, written), (read, its_output) = os.pipe(), os.pipe()
        socket.send_fds(self._server, [b"\n"], [its_input, its_output])
        os.close(its_input)
        os.close(its_output)
        self.stdin, self.stdout = os.fdopen(written, "wb"), os.fdopen(read, "rb")
        self.pid, self._status = self._told(), None

    def _told(self) -> int:
        number = self._server.recv(_NUMBER.size, socket.MSG_WAITALL)
        return _NUMBER.unpack(number)[0] if number else -signal.SIGKILL  # the server ended, and its forks with it

    def poll(self) -> int | None:
        """Return the exit status, or None while the process is running."""
        has_ended = self._status is not None or select.select([self._server], [], [], 0)[0]
        return self.wait() if has_ended else None

    def wait(self) -> int:
        self._status = self._told() if self._status is None else self._status
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


# In place of the module `subprocess` of stages/shared/chat_format/template.py.
FORKING = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)


@functools.cache
def _server() -> str:
    """Start the server of this process, and return its address."""
    place = str(process_dir("templates") / "socket")
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.template_server", place]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
    atexit.register(server.kill)
    server.stdout.readline()
    return place


def _serve(place: str) -> None:
    """Fork a process for each connection, until the owner of the server ends."""
    from stages.shared.chat_format import template_process  # imports transformers, which no test process needs for this

    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(128)
        print(flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            _, streams, _, _ = socket.recv_fds(connection, 1, 2)
            if os.fork() == 0:
                listener.close()
                _start(template_process.main, connection, streams)
            connection.close()
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass  # otherwise the processor seconds of forks that have ended would count nowhere


def _start(program: Callable[[], None], connection: socket.socket, streams: list[int]) -> None:
    """Run the program in a fork of this fork, and tell its pid and its exit status. Never returns."""
    pid = os.fork()
    for number, stream in enumerate([*streams, os.open(os.devnull, os.O_WRONLY)]):
        os.dup2(stream, number)
        os.close(stream)
    try:
        if pid == 0:
            connection.close()
            program()
        else:
            os.closerange(0, 2)  # the pipes are the program's alone
            connection.send(_NUMBER.pack(pid))
            connection.send(_NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    finally:
        os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
