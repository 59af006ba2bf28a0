"""MLflow's store: its address, a client for it, its locks, and which of its errors may be temporary.

MLflow stores the addresses of its files as absolute paths. Addresses in a root's own database are updated when the root
is moved (see `migrate`).
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from urllib.parse import quote

import filelock
import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from dataset_builders.errors import InputError
from dataset_builders.storage.files import check_database
from dataset_builders.storage.store import StorePath, side_dir, without_userinfo
from flows.libraries.mlflow_private import update_addresses
from flows.tracking.servers import kept_ports, mlflow_files, service_dir

# Error codes after which the same call can never succeed.
_FINAL = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
}
_PASSING_STATUSES = (401, 403, 408, 425, 429)  # no login yet, slow, full; other 4xx statuses are permanent
_SCHEMA_LOCK = 0x617468616E6F72  # number of an advisory lock of Postgres: the bytes of "athanor"
_LOCK_SECONDS = 120
log = logging.getLogger("athanor.tracking")
DATABASE, FILES = "mlflow.db", "mlflow-artifacts"  # in the root
_KIND_TAG = "mlflow.experimentKind"  # without this tag MLflow first shows its pages for generated text


def tracking_uri(root: StorePath) -> str:
    """Return the address of the tracking store: MLFLOW_TRACKING_URI if it is set, else SQLite in the root.

    For a root in an object store, the SQLite file is in the root's directory on this machine.

    Raises:
        InputError: the address has a password, which pages and messages would show.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{(side_dir(root) / DATABASE).resolve()}"
    if without_userinfo(uri) != uri:
        raise InputError(
            f"MLFLOW_TRACKING_URI={without_userinfo(uri)}: must not carry a password, which logs would show; "
            "put it in MLFLOW_TRACKING_PASSWORD, or in PGPASSWORD for a database"
        )
    return uri


def store_digest(root: StorePath) -> str:
    """Return a digest that identifies the tracking store without showing its address."""
    return hashlib.sha256(tracking_uri(root).encode()).hexdigest()[:16]


def server_url(root: StorePath) -> str | None:
    """Return the address of MLflow's pages: the server of MLFLOW_TRACKING_URI, or the root's own service at its
    recorded port, whether it is running or not. None if MLFLOW_TRACKING_URI is a database, whose server is unknown."""
    uri = tracking_uri(root)
    if uri.startswith("http"):
        return uri.rstrip("/")
    return f"http://127.0.0.1:{kept_ports(service_dir(root))['mlflow']}" if has_own_database() else None


def has_own_database() -> bool:
    """Whether runs are stored in the root's own database, which `athanor up` serves."""
    return not os.environ.get("MLFLOW_TRACKING_URI")


def compare_url(run_ids: Sequence[str], experiment_id: str, base: str) -> str:
    """Return the address of MLflow's page that shows runs side by side and marks the parameters that differ."""
    runs, experiments = quote(json.dumps(list(run_ids))), quote(json.dumps([experiment_id]))
    return f"{base}/#/compare-runs?runs={runs}&experiments={experiments}"


def connect(root: StorePath) -> MlflowClient:
    """Return a client of the store, and make the store's tables if they are missing.

    The tables are made under locks. If two processes made them at the same time, a new SQLite file would be ruined, and
    on a new Postgres database all processes except one would fail.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # This module of MLflow logs the traceback of an error that it then raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    uri = tracking_uri(root)
    with store_lock(root), _schema_lock(uri):
        if has_own_database():
            make_tables(root)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
        migrate(root)
    return client


def make_tables(root: StorePath) -> None:
    """Make the root's own database if there is none. The file gets its name when it has all tables, because MLflow
    refuses tables for ever that a killed process or a full disk left half made."""
    database = (side_dir(root) / DATABASE).resolve()
    if database.is_file() and database.stat().st_size:
        return
    check_own_database(root)  # MLflow would try to open a directory again and again
    unfinished = database.with_name(f"{DATABASE}.tmp")
    for path in database.parent.glob(f"{unfinished.name}*"):
        path.unlink()
    SqlAlchemyStore(f"sqlite:///{unfinished}", mlflow_files(root).as_uri())
    unfinished.replace(database)


def migrate(root: StorePath) -> None:
    """Update the addresses in a root's own database after the root was copied or moved."""
    database = (side_dir(root) / DATABASE).resolve()
    if database.is_file():
        update_addresses(database, FILES, _LOCK_SECONDS)


def check_own_database(root: StorePath) -> None:
    """Raise an InputError if runs are stored in the root's own database and it is ruined or cannot be written."""
    if has_own_database():
        lost = "earlier runs; the same command sends its run again"
        check_database((side_dir(root) / DATABASE).resolve(), lost)


def store_lock(root: StorePath) -> filelock.BaseFileLock:
    """Return the lock for work that only one process of a root may do at a time."""
    side_dir(root).mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(side_dir(root) / "mlflow.db.lock", timeout=_LOCK_SECONDS)


@contextlib.contextmanager
def _schema_lock(uri: str) -> Iterator[None]:
    """Hold the lock of a Postgres database, which several machines may share. Do nothing for other stores."""
    if not uri.startswith("postgresql"):
        yield
        return
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": _SCHEMA_LOCK})
        yield  # the lock is released when the connection is closed


def experiment_of(client: MlflowClient, root: StorePath, name: str) -> str:
    """Return the id of an experiment. Make the experiment if it does not exist."""
    with store_lock(root):
        if (experiment := client.get_experiment_by_name(name)) is not None:
            return experiment.experiment_id
        is_local = not tracking_uri(root).startswith("http")
        location = mlflow_files(root).as_uri() if is_local else None
        return client.create_experiment(name, location, {_KIND_TAG: "custom_model_development"})


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later: the server is down, slow or full."""
    if isinstance(error, MlflowException):
        return error.error_code not in _FINAL
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return False  # a file of this machine is missing, so the artifact no longer exists
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and 400 <= status < 500:
        return status in _PASSING_STATUSES
    return isinstance(error, OSError | sqlalchemy.exc.SQLAlchemyError)
