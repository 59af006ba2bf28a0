"""The files of a root's servers, and the record by which other commands on this machine find a running service."""

import json
import os
import socket
from pathlib import Path

from pydantic import ValidationError

from dataset_builders.storage.files import check_database, write_json
from dataset_builders.storage.store import StorePath, side_dir
from flows.prefect_server.access import (
    MLFLOW_PASSWORD,
    MLFLOW_USER,
    PREFECT_CLIENT_SECRET,
    client_logins,
    past_the_proxy,
)
from stages.shared.launchers.processes import Owner

POOL = "athanor"
FILES_VARIABLE = "ATHANOR_MLFLOW_FILES"  # the directory that `mlflow-artifacts:` of a root's own service stands for
DEFAULT_ROOT = "athanor-root"
SCHEMA_LOCK = "schema.lock"  # in Prefect's home, held while the tables of its database are made


class ServiceRecord(Owner):
    """A running service, and the process that watches its programs.

    Attributes:
        prefect_api: value for PREFECT_API_URL.
        prefect_ui, mlflow: addresses for a browser; `mlflow` is also the value for MLFLOW_TRACKING_URI.
        started: time of the start, ISO 8601 in UTC.
        ready: whether all programs answer.
    """

    root: str
    prefect_api: str
    prefect_ui: str
    mlflow: str
    started: str
    ready: bool = False


def service_dir(root: StorePath) -> Path:
    """Return the directory of a service's files: record, lock, logs."""
    return side_dir(root) / "service"


def mlflow_files(root: StorePath) -> Path:
    """Return the directory for the files of a root's own MLflow."""
    return side_dir(root).resolve() / "mlflow-artifacts"


def prefect_home(root: StorePath) -> Path:
    """Return the directory of Prefect's settings, and of its database unless Postgres is used: PREFECT_HOME if it is
    set, else a directory below the root."""
    return Path(os.environ.get("PREFECT_HOME") or side_dir(root) / "prefect")


def check_prefect_database(home: Path) -> None:
    """Check the database of Prefect's server, if it is a file of PREFECT_HOME.

    Raises:
        InputError: the database is ruined or cannot be written.
    """
    check_database(home / "prefect.db", "the states of earlier flow runs; artifacts and scores stay")


def write_record(root: StorePath, record: ServiceRecord) -> None:
    """Write the record to its file."""
    write_json(service_dir(root) / "service.json", record.model_dump(mode="json"))


def remove_record(root: StorePath) -> None:
    """Remove the record, so that no command uses the service any longer."""
    (service_dir(root) / "service.json").unlink(missing_ok=True)


def read_service(root: StorePath) -> ServiceRecord | None:
    """Return the record of the service that serves this root and answers; None if no service is running or ready."""
    record = read_record(root)
    return record if record is not None and record.ready else None


def read_record(root: StorePath) -> ServiceRecord | None:
    """Return the record of the running service, even if it is still starting. See `read_service`."""
    try:
        values = json.loads((service_dir(root) / "service.json").read_text(encoding="utf-8"))
        record = ServiceRecord.model_validate(values)
    except (OSError, ValueError, ValidationError):
        return None  # there is no record, or it is of another version
    return record if record.host == socket.gethostname() and not record.is_dead() else None


def use_service(root: StorePath) -> ServiceRecord | None:
    """Let this process and its children use the service of the root, unless the user has set the address of another.

    Must be called before Prefect is imported, because Prefect reads its address only once. The service's password is
    set only for the servers of the service.

    Returns:
        the record of the service; None if no service is running.

    Raises:
        InputError: the service belongs to another user, who has not shared its password.
    """
    service = read_service(root)
    if service is not None:
        logins = client_logins(service_dir(root))
        os.environ.setdefault("PREFECT_API_URL", service.prefect_api)
        os.environ.setdefault("PREFECT_UI_URL", service.prefect_ui)
        os.environ.setdefault("MLFLOW_TRACKING_URI", service.mlflow)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.update(past_the_proxy())
        needed = {PREFECT_CLIENT_SECRET} if os.environ["PREFECT_API_URL"] == service.prefect_api else set()
        if os.environ["MLFLOW_TRACKING_URI"] == service.mlflow:
            needed |= {MLFLOW_USER, MLFLOW_PASSWORD}
            os.environ[FILES_VARIABLE] = str(mlflow_files(root))
        os.environ.update({name: value for name, value in logins.items() if name in needed})
    return service
