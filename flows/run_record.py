"""Which process runs a flow run, and which slots it holds: files in the root that outlive a killed process.

    <root>/service/runs/<flow run id>.json      written when the flow starts, removed when its process ends
    <root>/service/leases/<lease id>.json       while a slot of a concurrency limit is held

Prefect knows a process id at best, and not the host; from these files the next one to come sees who is dead.
"""

import atexit
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import psutil
from prefect.runtime import flow_run
from pydantic import ValidationError

from dataset_builders.contracts.files import write_json
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.strict import StrictModel
from flows.service.record import service_dir

FORMAT_VERSION = 1
_SAME_START_SECONDS = 2.0  # two readings of a process's start differ by rounding


class Owner(StrictModel):
    """A process.

    Attributes:
        pid_started: seconds since 1970; with the pid it names a process for ever.
        host: whose pid it is.
    """

    format_version: int = FORMAT_VERSION
    pid: int
    pid_started: float
    host: str

    def is_dead(self) -> bool:
        """Ended for sure: it was of this host, and is there no longer. Nobody knows that of another host's."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.pid_started) > _SAME_START_SECONDS
                or process.status() == psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


class RunRecord(Owner):
    """A flow run and its process.

    Attributes:
        tracking_run: key of its MLflow run, once there is one.
    """

    flow_run_id: str
    tracking_run: str | None = None


class LeaseRecord(Owner):
    """A slot of a concurrency limit, held under a lease of Prefect's server."""

    lease_id: str
    limit: str
    flow_run_id: str | None = None


Record = TypeVar("Record", bound=Owner)


def this_process() -> dict[str, object]:
    """The fields of an Owner."""
    return {
        "pid": os.getpid(),
        "pid_started": psutil.Process().create_time(),
        "host": socket.gethostname(),
    }


def record_run(root: StorePath, tracking_run: str | None = None) -> None:
    """Note that this process runs the current flow run, until it ends; does nothing outside a flow run.

    Args:
        tracking_run: key of the MLflow run; None leaves the one that was noted before.
    """
    flow_run_id = flow_run.id
    if flow_run_id is None:
        return
    path = _runs(root) / f"{flow_run_id}.json"
    before = _read(path, RunRecord)
    is_new = before is None or before.pid != os.getpid()
    record = RunRecord(flow_run_id=str(flow_run_id), tracking_run=tracking_run, **this_process())
    if not is_new and record.tracking_run in (None, before.tracking_run):
        return
    _write(path, record)
    if is_new:
        # At the end of the process and not of the flow: the final state must have reached the server before.
        atexit.register(_forget_own, path, os.getpid())


def read_runs(root: StorePath) -> list[RunRecord]:
    """Every noted flow run, of living and of dead processes."""
    return list(_read_all(_runs(root), RunRecord))


def forget_run(root: StorePath, record: RunRecord) -> None:
    """The flow run is settled; a record that a newer process has written meanwhile stays."""
    path = _runs(root) / f"{record.flow_run_id}.json"
    if _read(path, RunRecord) == record:
        path.unlink(missing_ok=True)


def record_lease(root: StorePath, lease: LeaseRecord) -> None:
    """Note a slot that this process holds."""
    _write(_leases(root) / f"{lease.lease_id}.json", lease)


def read_leases(root: StorePath) -> list[LeaseRecord]:
    """Every noted slot, of living and of dead processes."""
    return list(_read_all(_leases(root), LeaseRecord))


def forget_lease(root: StorePath, lease_id: str) -> None:
    """The slot is given back."""
    (_leases(root) / f"{lease_id}.json").unlink(missing_ok=True)


def _runs(root: StorePath) -> Path:
    return service_dir(root) / "runs"


def _leases(root: StorePath) -> Path:
    return service_dir(root) / "leases"


def _write(path: Path, record: Owner) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record.model_dump())


def _read_all(directory: Path, model: type[Record]) -> Iterator[Record]:
    for path in sorted(directory.glob("*.json")):
        if (record := _read(path, model)) is not None:
            yield record


def _read(path: Path, model: type[Record]) -> Record | None:
    """None for what is not there, or of another version: it is nobody's then."""
    with contextlib.suppress(OSError, ValueError, ValidationError):
        record = model.model_validate_json(path.read_bytes())
        if record.format_version == FORMAT_VERSION:
            return record
    return None


def _forget_own(path: Path, pid: int) -> None:
    record = _read(path, RunRecord)
    if os.getpid() == pid and record is not None and record.pid == pid:  # a forked child runs atexit too
        path.unlink(missing_ok=True)
