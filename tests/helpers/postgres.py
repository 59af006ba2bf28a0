"""A temporary Postgres from Debian's packages, run as the user postgres, which initdb needs, on a free loopback
port."""

import contextlib
import importlib
import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.compose_file import INFRA
from tests.helpers.object_store import free_port

BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), Path("-")).parent
USER = "postgres"


@dataclass(frozen=True)
class PostgresServer:
    """A running server that requires a password."""

    port: int
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        """Return the server's URL, without the password."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/"

    def query(self, sql: str, database: str = "postgres") -> list[tuple]:
        with contextlib.closing(self._connection(database)) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def make_databases(self, values: Mapping[str, str]) -> None:
        """Make the databases of compose.yaml, by the script that makes them there, with these variables."""
        env = {**os.environ, **values, "PATH": f"{BINARIES}:{os.environ['PATH']}"}
        env |= {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGPASSWORD": self.password}
        subprocess.run(["bash", str(INFRA / "postgres" / "databases.sh")], env=env, check=True)

    def create_database(self, name: str) -> None:
        with contextlib.closing(self._connection("postgres")) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")

    def _connection(self, database: str):
        psycopg2 = importlib.import_module("psycopg2")
        about = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": self.password}
        connection = psycopg2.connect(dbname=database, **about)
        connection.autocommit = True
        return connection


def requires_postgres() -> pytest.MarkDecorator:
    """Skip a test if there are no binaries or drivers, or if this user cannot become the user postgres."""
    missing = []
    if not (BINARIES / "initdb").exists():
        missing.append("apt-get install postgresql")
    for module in ("psycopg2", "asyncpg"):
        if importlib.util.find_spec(module) is None:
            missing.append("pip install -e '.[postgres]'")
    if os.geteuid() == 0 and USER not in {entry.pw_name for entry in pwd.getpwall()}:
        missing.append(f"a user {USER}")
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a new cluster, which is deleted at the end."""
    folder = Path(tempfile.mkdtemp(prefix="athanor-postgres-"))
    server = PostgresServer(free_port(), secrets.token_hex(16))
    is_root = os.geteuid() == 0
    try:
        password = folder / "password"
        password.write_text(server.password)
        if is_root:
            for path in (folder, password):
                shutil.chown(path, USER)
        about = ["-U", USER, "-A", "scram-sha-256", "--pwfile", str(password), "--no-sync", "-E", "UTF8"]
        _run(["initdb", "-D", str(folder / "data"), *about], is_root)
        settings = f"-p {server.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        _run(["pg_ctl", "-D", str(folder / "data"), "-w", "-l", str(folder / "log"), "-o", settings, "start"], is_root)
        try:
            yield server
        finally:
            _run(["pg_ctl", "-D", str(folder / "data"), "-w", "-m", "immediate", "stop"], is_root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], is_root: bool) -> None:
    words = [str(BINARIES / command[0]), *command[1:]]
    about = {"user": USER, "group": USER, "extra_groups": []} if is_root else {}
    done = subprocess.run(words, cwd="/", text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **about)
    assert done.returncode == 0, done.stderr
