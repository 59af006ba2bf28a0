"""Records of each flow run's process and of the slot that it holds: files in the root that outlive a killed process.

    <root>/service/runs/<flow run id>.json      written when the flow starts, removed when its process ends

Prefect knows at most a process id, and no host. From these files, later processes see which owners are dead.
"""

import atexit
import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import StorePath
from flows.tracking.servers import service_dir
from stages.shared.launchers.processes import Owner

FORMAT_VERSION = 1


class RunRecord(Owner):
    """A flow run and its process.

    Attributes:
        tracking_run: key of its MLflow run; None until there is one.
        limit, lease_id: the concurrency limit of which the run holds a slot, and the lease of Prefect's server; None
            while it holds none.
        saved: what a training has saved because the run was cancelled, as `step 215 saved`; the worker tells it.
    """

    format_version: int = FORMAT_VERSION
    flow_run_id: str
    tracking_run: str | None = None
    limit: str | None = None
    lease_id: str | None = None
    saved: str = ""


def record_run(root: StorePath, tracking_run: str | None = None) -> None:
    """Record that this process runs the current flow run, until the process ends. Does nothing outside a flow run.

    Args:
        tracking_run: key of the MLflow run; None keeps the one in the record.
    """
    _record(root, {} if tracking_run is None else {"tracking_run": tracking_run})


def record_slot(root: StorePath, limit: str | None, lease_id: str | None) -> None:
    """Record the slot that the current flow run holds. Does nothing outside a flow run."""
    _record(root, {"limit": limit, "lease_id": lease_id})


def record_saved(root: StorePath, flow_run_id: str, saved: str) -> None:
    """Record what a training of this process's outermost flow run has saved. See `take_saved`."""
    path = _runs(root) / f"{flow_run_id}.json"
    if (record := _read(path)) is not None and record.pid == os.getpid():
        write_json(path, record.model_copy(update={"saved": saved}).model_dump())


def take_saved(root: StorePath, flow_run_id: str) -> str:
    """Return what the training of a cancelled flow run has saved, and remove the record; empty if there is none."""
    record = _read(_runs(root) / f"{flow_run_id}.json")
    if record is None or not record.saved:
        return ""
    forget_run(root, record)
    return record.saved


def _record(root: StorePath, changes: dict[str, str | None]) -> None:
    from prefect.runtime import flow_run  # every flow has imported it; `athanor gc` only reads the records

    if flow_run.id is None:
        return
    path = _runs(root) / f"{flow_run.id}.json"
    before, owner = _read(path), Owner.of_this_process()
    is_new = before is None or before.pid != owner.pid  # another process may have tried this run earlier
    record = RunRecord(flow_run_id=str(flow_run.id), **owner.model_dump()) if is_new else before
    record = record.model_copy(update=changes)
    if record == before:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record.model_dump())
    if is_new:
        # The record is removed at the end of the process, not of the flow, when the server has the final state.
        atexit.register(_forget_own, path, owner.pid)


def read_runs(root: StorePath) -> list[RunRecord]:
    """Return the records of all flow runs, whether their processes are running or dead."""
    return [record for path in sorted(_runs(root).glob("*.json")) if (record := _read(path)) is not None]


def forget_run(root: StorePath, record: RunRecord) -> None:
    """Remove the record of a settled flow run. A record that a newer process has written in the meantime is kept."""
    path = _runs(root) / f"{record.flow_run_id}.json"
    if _read(path) == record:
        path.unlink(missing_ok=True)


def _runs(root: StorePath) -> Path:
    return service_dir(root) / "runs"


def _read(path: Path) -> RunRecord | None:
    """Return the record in a file; None if there is no record, or one of another version."""
    with contextlib.suppress(OSError, ValueError, ValidationError):
        record = RunRecord.model_validate_json(path.read_bytes())
        if record.format_version == FORMAT_VERSION:
            return record
    return None


def _forget_own(path: Path, pid: int) -> None:
    record = _read(path)
    is_own = record is not None and record.pid == pid == os.getpid()  # a forked child runs atexit too
    if is_own and not record.saved:  # else the worker reads it
        path.unlink(missing_ok=True)
