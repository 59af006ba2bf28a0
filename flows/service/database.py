"""Postgres for Prefect and MLflow: own databases, made where they are missing, schemas made by one service at a time.

A password stands in the environment alone: in no command line, no record, no URL that a server could log.
"""

import contextlib
import getpass
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from dataset_builders.contracts.errors import InputError

DATABASE_VARIABLE = "ATHANOR_DATABASE"
PASSWORD_VARIABLE = "PGPASSWORD"
DEFAULT_PREFIX = "athanor"
_SCHEMA_LOCK = 0x617468616E6F72  # "athanor": key of the advisory lock; stages/tracking_store.py has the same
_LOCK_SECONDS = 180.0
_EXAMPLE = "postgresql://user@host:5432/"


@dataclass(frozen=True, slots=True)
class Postgres:
    """A server, and the databases on it.

    Attributes:
        password: from the environment; None: the server asks for none, or ~/.pgpass has it.
        prefix: the databases are PREFIX_prefect and PREFIX_mlflow.
        sslmode: libpq's word; None: its default.
    """

    host: str
    port: int
    user: str
    password: str | None
    prefix: str
    sslmode: str | None

    def __repr__(self) -> str:
        return f"Postgres({self.place})"

    @property
    def place(self) -> str:
        """For a person: no user, no password."""
        return f"{self.host}:{self.port}, databases {self.name('prefect')} and {self.name('mlflow')}"

    def name(self, program: str) -> str:
        """Of the database of a program."""
        return f"{self.prefix}_{program}"

    def environment(self, program: str) -> dict[str, str]:
        """What the server of a program finds its database by."""
        bare = f"{quote(self.user, safe='')}@{_bracketed(self.host)}:{self.port}/{quote(self.name(program), safe='')}"
        password = {PASSWORD_VARIABLE: self.password} if self.password is not None else {}
        if program == "mlflow":
            query = f"?sslmode={self.sslmode}" if self.sslmode else ""
            return {"MLFLOW_BACKEND_STORE_URI": f"postgresql+psycopg2://{bare}{query}", **password}
        query = f"?ssl={self.sslmode}" if self.sslmode else ""
        return {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{bare}{query}", **password}


def find_database(option: str | None, environment: Mapping[str, str] = os.environ) -> Postgres | None:
    """The Postgres of --database or of ATHANOR_DATABASE; None: SQLite in the root.

    Raises:
        InputError: no such URL, a password where others can read it, or a driver that is not installed.
    """
    text, source = (option, "--database") if option else (environment.get(DATABASE_VARIABLE), DATABASE_VARIABLE)
    if not text:
        return None
    found = _parse(text, source, environment)
    if option and found.password != environment.get(PASSWORD_VARIABLE):
        raise InputError(
            "--database holds a password, which everybody on this machine could read in the list of processes; put it "
            f"into {PASSWORD_VARIABLE}, or the whole URL into {DATABASE_VARIABLE}"
        )
    for name in ("psycopg2", "asyncpg"):
        _driver(name)
    return found


def _parse(text: str, source: str, environment: Mapping[str, str]) -> Postgres:
    try:
        url = urlsplit(text)
        port = url.port or 5432
    except ValueError:
        raise InputError(f"{source} is no URL; give one as {_EXAMPLE}") from None
    if url.scheme not in ("postgresql", "postgres") or not url.hostname:
        raise InputError(f"{source} is no address of a Postgres server; give one as {_EXAMPLE}")
    options = dict(parse_qsl(url.query))
    if unknown := sorted(options.keys() - {"sslmode"}):
        raise InputError(f"{source} has the option {unknown[0]}, which is not known; only sslmode is")
    password = unquote(url.password) if url.password is not None else environment.get(PASSWORD_VARIABLE)
    return Postgres(
        host=url.hostname,
        port=port,
        user=unquote(url.username or "") or getpass.getuser(),
        password=password,
        prefix=unquote(url.path.strip("/")) or DEFAULT_PREFIX,
        sslmode=options.get("sslmode"),
    )


def _driver(name: str) -> ModuleType:
    """The only place that imports a driver: it is needed for Postgres alone."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"--database needs {name}, which is not installed; pip install 'athanor[postgres]'") from None


@contextlib.contextmanager
def schemas_made_alone(database: Postgres) -> Iterator[list[str]]:
    """While the block lasts, nobody else makes our databases or their tables; the databases are there.

    Yields:
        names of the databases that were missing and have been made.

    Raises:
        InputError: the server cannot be reached, refuses us, or lets us make no database.
    """
    psycopg2 = _driver("psycopg2")
    with contextlib.ExitStack() as held:
        try:
            cursor = _locked(psycopg2, database, "postgres", held)
            made = [name for name in map(database.name, ("prefect", "mlflow")) if _make(cursor, name, psycopg2)]
            # An advisory lock holds within its database: this one is for programs that talk to MLflow's directly.
            _locked(psycopg2, database, database.name("mlflow"), held)
        except psycopg2.OperationalError as error:
            raise InputError(f"--database {database.host}:{database.port}: {_reason(error)}") from None
        yield made


def _locked(psycopg2: ModuleType, database: Postgres, name: str, held: contextlib.ExitStack) -> Any:
    """A cursor of a connection that has the lock; it is free when the connection is closed."""
    about = {"host": database.host, "port": database.port, "user": database.user, "connect_timeout": 10}
    about |= {"password": database.password} if database.password is not None else {}
    about |= {"sslmode": database.sslmode} if database.sslmode else {}
    connection = psycopg2.connect(dbname=name, application_name="athanor up", **about)
    held.callback(connection.close)
    connection.autocommit = True
    cursor = connection.cursor()
    deadline = time.monotonic() + _LOCK_SECONDS
    while not _is_got(cursor):  # a call that waits by itself could not be stopped by Ctrl-C
        if time.monotonic() > deadline:
            raise InputError(
                f"--database {database.host}:{database.port}: somebody else makes tables there for minutes"
            )
        time.sleep(0.2)
    return cursor


def _is_got(cursor: Any) -> bool:
    cursor.execute("SELECT pg_try_advisory_lock(%s)", (_SCHEMA_LOCK,))
    return cursor.fetchone()[0]


def _make(cursor: Any, name: str, psycopg2: ModuleType) -> bool:
    cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
    if cursor.fetchone():
        return False
    quoted = name.replace('"', '""')
    try:
        cursor.execute(f'CREATE DATABASE "{quoted}"')
    except psycopg2.errors.InsufficientPrivilege:
        raise InputError(
            f"--database: this user may not make the database {name}; let an administrator type: "
            f'CREATE DATABASE "{quoted}" OWNER <user>'
        ) from None
    return True


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[-1].removeprefix("FATAL:").strip() if text else type(error).__name__


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
