"""An S3 store for tests: moto's server in a process of its own, and a proxy in front of it that cuts connections."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

from upath import UPath

from tests.helpers.patience import at_most

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "bucket"


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run an empty store, and yield its address. The environment names the store while the block lasts."""
    port = free_port()
    # A separate program, because moto's threaded server would share the interpreter lock with the tests' event loop.
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address)
        with environment(address):
            UPath(f"s3://{BUCKET}").fs.mkdir(BUCKET)
            yield address
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def environment(address: str) -> Iterator[None]:
    """Let the S3 drivers of this process and its children use `address`."""
    new = {**KEYS, "AWS_ENDPOINT_URL": address}
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    clear_drivers()
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        clear_drivers()


def clear_drivers() -> None:
    """Drop the drivers' connections to a store of another address."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + at_most(60)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/moto-api/", timeout=2):
            return
        time.sleep(0.1)
    raise TimeoutError(f"moto's server at {address} did not answer within 60 s")


class CuttingProxy:
    """A proxy of a server that breaks connections in the middle when it is told to.

    Attributes:
        cut_down, cut_up: for each of the next large answers (requests), the bytes after which its connection is broken.
        cuts: number of broken connections.
    """

    BIG = 20_000  # bytes; smaller messages are let through, so that a cut is always in the middle of content

    def __init__(self, address: str) -> None:
        self._server = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_down: list[int] = []
        self.cut_up: list[int] = []
        self.cuts = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "CuttingProxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                passed = {"up": 0, "down": 0}
                for way, source, target in (("up", client, server), ("down", server, client)):
                    threading.Thread(target=self._pump, args=(way, source, target, passed), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, target: socket.socket, passed: dict[str, int]) -> None:
        other, cuts = ("down", self.cut_up) if way == "up" else ("up", self.cut_down)
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                passed[way], passed[other] = passed[way] + len(data), 0  # an answer ends the request, and vice versa
                if passed[way] > self.BIG and self._cut(cuts, passed[way]):
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cut(self, cuts: list[int], passed: int) -> bool:
        with self._lock:
            if not cuts or passed < cuts[0]:
                return False
            cuts.pop(0)
            self.cuts += 1
            return True
