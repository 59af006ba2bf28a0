"""Where MLflow's runs are, how to get a client for it, and which of its errors may pass by themselves."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from urllib.parse import quote

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
# The journal tries again by itself, and looks first whether the last try has arrived; the client would only repeat.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "180")  # nobody waits for the sending thread

import filelock
import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, side_dir, without_userinfo

# error codes after which the same call can never succeed
_FINAL = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
}
_SCHEMA_LOCK = 0x617468616E6F72  # of Postgres' advisory locks, which are numbers: "athanor"
_LOCK_SECONDS = 120
_KIND_TAG = "mlflow.experimentKind"  # without it the pages begin with those for generated text


def tracking_uri(root: StorePath) -> str:
    """Where runs go: MLFLOW_TRACKING_URI if it is set, else SQLite in the root (of a store: on this machine).

    Raises:
        InputError: there is a password in it, which pages and messages that name it would show.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{(side_dir(root) / 'mlflow.db').resolve()}"
    if without_userinfo(uri) != uri:
        raise InputError(
            f"MLFLOW_TRACKING_URI={without_userinfo(uri)}: must not carry a password, which logs would show; "
            "put it in MLFLOW_TRACKING_PASSWORD, or in PGPASSWORD for a database"
        )
    return uri


def store_digest(root: StorePath) -> str:
    """Names the store without its address, which may hold a password."""
    return hashlib.sha256(tracking_uri(root).encode()).hexdigest()[:16]


def server_command(root: StorePath, program: str = "mlflow") -> str | None:
    """What a person types to look at the runs of a root; None where a server is set, which runs already."""
    uri = tracking_uri(root)
    if uri.startswith("http"):
        return None
    return f"{program} server --backend-store-uri {uri} --host 127.0.0.1 --port 5000"


def server_url(root: StorePath) -> str:
    """Where pages are: the server of MLFLOW_TRACKING_URI, or the one that `server_command` starts."""
    uri = tracking_uri(root)
    return uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"


def compare_url(run_ids: Sequence[str], experiment_id: str, base: str) -> str:
    """MLflow's page that sets runs side by side; they differ in their names and in the marked parameters."""
    runs, experiments = quote(json.dumps(list(run_ids))), quote(json.dumps([experiment_id]))
    return f"{base}/#/compare-runs?runs={runs}&experiments={experiments}"


def connect(root: StorePath) -> MlflowClient:
    """A client whose store has its schema. Two processes that make it at once would ruin a fresh SQLite file, and all
    but one fail on a fresh Postgres."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    uri = tracking_uri(root)
    with store_lock(root), _schema_lock(uri):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


def store_lock(root: StorePath) -> filelock.BaseFileLock:
    """For what one process of a root has to do at a time."""
    side_dir(root).mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(side_dir(root) / "mlflow.db.lock", timeout=_LOCK_SECONDS)


@contextlib.contextmanager
def _schema_lock(uri: str) -> Iterator[None]:
    """Several roots, on several machines, may share a Postgres: its own lock holds for all of them."""
    if not uri.startswith("postgresql"):
        yield
        return
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": _SCHEMA_LOCK})
        yield  # the lock ends with the connection


def experiment_of(client: MlflowClient, root: StorePath, name: str) -> str:
    """The id of an experiment, which is made where there is none."""
    with store_lock(root):
        if (found := client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        is_local = not tracking_uri(root).startswith("http")
        location = (side_dir(root) / "mlflow-artifacts").resolve().as_uri() if is_local else None
        return client.create_experiment(name, location, {_KIND_TAG: "custom_model_development"})


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later: the server is down, slow or full. Else it never will."""
    if isinstance(error, MlflowException):
        return error.error_code not in _FINAL
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return False  # of this machine: the artifact is gone
    return isinstance(error, OSError | sqlalchemy.exc.SQLAlchemyError)


def is_gone(error: Exception) -> bool:
    """Whether MLflow does not know the run any more that it had."""
    return isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST"
