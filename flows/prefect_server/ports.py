"""Free ports that stay the same from one start of a service to the next, so that bookmarks keep working."""

import contextlib
import json
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import filelock

from dataset_builders.storage.files import write_json

DEFAULTS = {"prefect": 4200, "mlflow": 5000}


@contextlib.contextmanager
def reserve_ports(directory: Path, host: str) -> Iterator[dict[str, int]]:
    """Choose a free port for each program: the port of last time, else the usual port, else any port.

    While the block lasts, no other service of this machine chooses these ports. This matters because a server takes
    seconds until it listens.

    Yields:
        program -> its port.
    """
    last, chosen = DEFAULTS | recorded_ports(directory), {}
    with contextlib.ExitStack() as locks:
        for name, usual in DEFAULTS.items():
            candidates = [last[name], usual, *(any_port(host) for _ in range(5))]
            chosen[name] = next(port for port in candidates if is_free(host, port) and _lock(port, locks))
        write_json(directory / "ports.json", chosen)
        yield chosen


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()  # with SO_REUSEADDR two sockets may be bound to a port, but only one can listen
        except OSError:
            return False
    return True


def _lock(port: int, locks: contextlib.ExitStack) -> bool:
    try:
        locks.enter_context(filelock.FileLock(Path(tempfile.gettempdir(), f"athanor-port-{port}.lock"), timeout=0))
    except (filelock.Timeout, OSError):  # held by another service, or owned by another user
        return False
    return True


def any_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def kept_ports(directory: Path, host: str = "127.0.0.1") -> Mapping[str, int]:
    """Return program -> its recorded port. If the service never ran, choose ports that are free now and record them for
    its first start."""
    if not recorded_ports(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with reserve_ports(directory, host):
            pass
    return recorded_ports(directory)


def recorded_ports(directory: Path) -> Mapping[str, int]:
    """Return program -> its port of last time; empty if the service never ran."""
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((directory / "ports.json").read_text(encoding="utf-8"))
        return {name: values[name] for name in DEFAULTS if isinstance(values.get(name), int)}
    return {}
