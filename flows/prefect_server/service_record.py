"""The record of a running service: a file in its root, by which other commands of this machine find it."""

import json
import os
import socket
from pathlib import Path

from pydantic import ValidationError

from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import StorePath, side_dir
from flows.prefect_server.access import (
    MLFLOW_PASSWORD,
    MLFLOW_USER,
    PREFECT_CLIENT_SECRET,
    client_logins,
    past_the_proxy,
)
from stages.launchers.owner import Owner

FORMAT_VERSION = 1
POOL = "athanor"
FILES_VARIABLE = "ATHANOR_MLFLOW_FILES"  # where `mlflow-artifacts:` of a root's own service leads
DEFAULT_ROOT = "athanor-root"


class ServiceRecord(Owner):
    """A running service, and the process that watches its programs.

    Attributes:
        prefect_api: for PREFECT_API_URL.
        prefect_ui, mlflow: addresses for a browser; the second is for MLFLOW_TRACKING_URI too.
        started: ISO 8601, UTC.
        ready: whether everything answers.
    """

    format_version: int = FORMAT_VERSION
    root: str
    prefect_api: str
    prefect_ui: str
    mlflow: str
    pool: str = POOL
    started: str
    ready: bool = False


def service_dir(root: StorePath) -> Path:
    """The directory of a service's files: record, lock, logs."""
    return side_dir(root) / "service"


def mlflow_files(root: StorePath) -> Path:
    """The directory of the files of a root's own MLflow."""
    return side_dir(root).resolve() / "mlflow-artifacts"


def write_record(root: StorePath, record: ServiceRecord) -> None:
    """Put the record in its place."""
    write_json(service_dir(root) / "service.json", record.model_dump(mode="json"))


def remove_record(root: StorePath) -> None:
    """Remove the record: nobody shall use the service any longer."""
    (service_dir(root) / "service.json").unlink(missing_ok=True)


def read_service(root: StorePath) -> ServiceRecord | None:
    """The service that serves this root now and answers; None if there is none, or only the record of a dead one."""
    record = read_record(root)
    return record if record is not None and record.ready else None


def read_record(root: StorePath) -> ServiceRecord | None:
    """As `read_service`, also while the service is still starting."""
    try:
        values = json.loads((service_dir(root) / "service.json").read_text(encoding="utf-8"))
        record = ServiceRecord.model_validate(values)
    except (OSError, ValueError, ValidationError):
        return None  # there is none, or it is of another version
    lives = record.host == socket.gethostname() and not record.is_dead()
    return record if record.format_version == FORMAT_VERSION and lives else None


def use_service(root: StorePath) -> ServiceRecord | None:
    """Let this process and its children talk to the service of the root, unless the person has set another one.

    Must be called before Prefect is imported: it reads its address once. The service's password goes to the service
    alone.

    Returns:
        the record of the service; None if there is none.

    Raises:
        InputError: the service is another user's, who has not shared its password.
    """
    service = read_service(root)
    if service is not None:
        logins = client_logins(service_dir(root))
        os.environ.setdefault("PREFECT_API_URL", service.prefect_api)
        os.environ.setdefault("PREFECT_UI_URL", service.prefect_ui)
        os.environ.setdefault("MLFLOW_TRACKING_URI", service.mlflow)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.update(past_the_proxy())
        asked = {PREFECT_CLIENT_SECRET} if os.environ["PREFECT_API_URL"] == service.prefect_api else set()
        if os.environ["MLFLOW_TRACKING_URI"] == service.mlflow:
            asked |= {MLFLOW_USER, MLFLOW_PASSWORD}
            os.environ[FILES_VARIABLE] = str(mlflow_files(root))
        os.environ.update({name: value for name, value in logins.items() if name in asked})
    return service
