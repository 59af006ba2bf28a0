"""Prefect's temporary server: started early, and its SQLite tables made by one process at a time.

Two that migrate a fresh database at once ruin each other, and so does a signal in the middle of it.
"""

from pathlib import Path

import filelock
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_API_URL, PREFECT_HOME

from flows.service.prefect_home import SCHEMA_LOCK
from flows.service.prefect_template import DATABASE, keep_tables, marker, take_tables
from flows.service.temporary_server import TemporaryServer, is_temporary, server_of, use

_LOCK_SECONDS = 300.0  # a first start on a loaded laptop takes a minute


def start_early() -> None:
    """Begin to start the server while this process still loads its libraries; `start_prefect` waits for it.

    Not where the tables are still to be made: a person's typing error, found meanwhile, would end that half way.
    """
    home = PREFECT_HOME.value()
    if PREFECT_API_URL.value() is not None or not _is_ours(home):
        return
    home.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(home / SCHEMA_LOCK, timeout=_LOCK_SECONDS):
        if not take_tables(home):
            return
    server_of(home).begin()


def start_prefect() -> None:
    """Return when the temporary server answers that the flow of this process uses, and its tables are made.

    Where a server is set, nothing happens.
    """
    if PREFECT_API_URL.value() is not None and not is_temporary():
        return
    home = PREFECT_HOME.value()
    home.mkdir(parents=True, exist_ok=True)
    server = server_of(home)
    if marker(home).exists():
        _start(server)
        return
    with filelock.FileLock(home / SCHEMA_LOCK, timeout=_LOCK_SECONDS):
        is_fresh = _is_ours(home) and not take_tables(home) and not (home / DATABASE).exists()
        _start(server)
        if is_fresh:
            keep_tables(home)
        marker(home).touch()


def _is_ours(home: Path) -> bool:
    """Whether the server's database is the home's own file, and not one that the person has set."""
    return str(home / DATABASE) in str(PREFECT_API_DATABASE_CONNECTION_URL.value())


def _start(server: TemporaryServer) -> None:
    server.begin()
    server.wait()
    use(server)
