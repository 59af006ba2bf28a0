"""What a running service says about itself in a file of its root, so that other commands of this machine find it."""

import json
import socket
from pathlib import Path
from typing import Literal

import psutil
from pydantic import ValidationError

from dataset_builders.contracts.files import write_json
from dataset_builders.contracts.store import StorePath, side_dir
from dataset_builders.contracts.strict import StrictModel

FORMAT_VERSION = 1
POOL = "athanor"
_SAME_START_SECONDS = 2.0  # two readings of a process's start differ by rounding


class ServiceRecord(StrictModel):
    """A running service.

    Attributes:
        pid, pid_started: of the process that watches the others; when it was started, in seconds since 1970.
        host: this machine's name.
        prefect_api: for PREFECT_API_URL.
        prefect_ui, mlflow: addresses for a browser; the second is for MLFLOW_TRACKING_URI too.
        database: its kind, never its address, which may hold a password.
        started: ISO 8601, UTC.
        ready: everything answers.
    """

    format_version: int = FORMAT_VERSION
    pid: int
    pid_started: float
    host: str
    root: str
    prefect_api: str
    prefect_ui: str
    mlflow: str
    pool: str = POOL
    database: Literal["sqlite", "postgresql"]
    started: str
    ready: bool = False


def service_dir(root: StorePath) -> Path:
    """Where a service keeps its files: record, lock, logs."""
    return side_dir(root) / "service"


def write_record(root: StorePath, record: ServiceRecord) -> None:
    """Put the record in its place."""
    write_json(service_dir(root) / "service.json", record.model_dump(mode="json"))


def remove_record(root: StorePath) -> None:
    """Nobody shall use the service any longer."""
    (service_dir(root) / "service.json").unlink(missing_ok=True)


def read_service(root: StorePath) -> ServiceRecord | None:
    """The service that serves this root now and answers; None where there is none, whatever a dead one has left."""
    record = read_record(root)
    return record if record is not None and record.ready else None


def read_record(root: StorePath) -> ServiceRecord | None:
    """As `read_service`, also while it is still starting."""
    try:
        values = json.loads((service_dir(root) / "service.json").read_text(encoding="utf-8"))
        record = ServiceRecord.model_validate(values)
    except (OSError, ValueError, ValidationError):
        return None  # none, or of another version
    return record if record.format_version == FORMAT_VERSION and _lives(record) else None


def _lives(record: ServiceRecord) -> bool:
    if record.host != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(record.pid).create_time() - record.pid_started) < _SAME_START_SECONDS
    except psutil.Error:
        return False
