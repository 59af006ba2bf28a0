"""Records of each flow run's process and of the slots that it holds: files in the root that outlive a killed process.

    <root>/service/runs/<flow run id>.json      written when the flow starts, removed when its process ends
    <root>/service/leases/<lease id>.json       while a slot of a concurrency limit is held

Prefect knows at most a process id, and no host. From these files, later processes see which owners are dead.
"""

import atexit
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from prefect.runtime import flow_run
from pydantic import ValidationError

from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import StorePath
from flows.prefect_server.service_record import service_dir
from stages.launchers.owner import Owner

FORMAT_VERSION = 1


class _Record(Owner):
    """A file that names the process that owns something."""

    format_version: int = FORMAT_VERSION


class RunRecord(_Record):
    """A flow run and its process.

    Attributes:
        tracking_run: key of its MLflow run; None until there is one.
    """

    flow_run_id: str
    tracking_run: str | None = None


class LeaseRecord(_Record):
    """A slot of a concurrency limit, held under a lease of Prefect's server."""

    lease_id: str
    limit: str
    flow_run_id: str | None = None


Record = TypeVar("Record", bound=_Record)


def this_process() -> dict[str, object]:
    """Return this process as the fields of an `Owner`."""
    return Owner.of_this_process().model_dump()


def record_run(root: StorePath, tracking_run: str | None = None) -> None:
    """Record that this process runs the current flow run, until the process ends. Does nothing outside a flow run.

    Args:
        tracking_run: key of the MLflow run; None keeps the one in the record.
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
        # The record is removed at the end of the process, not of the flow, when the server has the final state.
        atexit.register(_forget_own, path, os.getpid())


def read_runs(root: StorePath) -> list[RunRecord]:
    """Return the records of all flow runs, whether their processes are running or dead."""
    return list(_read_all(_runs(root), RunRecord))


def forget_run(root: StorePath, record: RunRecord) -> None:
    """Remove the record of a settled flow run. A record that a newer process has written in the meantime is kept."""
    path = _runs(root) / f"{record.flow_run_id}.json"
    if _read(path, RunRecord) == record:
        path.unlink(missing_ok=True)


def record_lease(root: StorePath, lease: LeaseRecord) -> None:
    """Record a slot that this process holds."""
    _write(_leases(root) / f"{lease.lease_id}.json", lease)


def read_leases(root: StorePath) -> list[LeaseRecord]:
    """Return the records of all slots, whether their processes are running or dead."""
    return list(_read_all(_leases(root), LeaseRecord))


def forget_lease(root: StorePath, lease_id: str) -> None:
    """Remove the record of a released slot."""
    (_leases(root) / f"{lease_id}.json").unlink(missing_ok=True)


def _runs(root: StorePath) -> Path:
    return service_dir(root) / "runs"


def _leases(root: StorePath) -> Path:
    return service_dir(root) / "leases"


def _write(path: Path, record: _Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record.model_dump())


def _read_all(directory: Path, model: type[Record]) -> Iterator[Record]:
    for path in sorted(directory.glob("*.json")):
        if (record := _read(path, model)) is not None:
            yield record


def _read(path: Path, model: type[Record]) -> Record | None:
    """Return the record in a file; None if there is no record, or one of another version."""
    with contextlib.suppress(OSError, ValueError, ValidationError):
        record = model.model_validate_json(path.read_bytes())
        if record.format_version == FORMAT_VERSION:
            return record
    return None


def _forget_own(path: Path, pid: int) -> None:
    record = _read(path, RunRecord)
    if os.getpid() == pid and record is not None and record.pid == pid:  # a forked child runs atexit too
        path.unlink(missing_ok=True)
