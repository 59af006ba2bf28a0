"""The files, ports and record of a root's own servers, by which other commands on this machine find them, and the
variables that servers and clients read.

The servers are those of `athanor up` (`flows/service/`). They are known in this room, the lowest, because MLflow's
pages are at the address of the service, and its files beside those of the service, whether it is running or not.
"""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import filelock
from pydantic import ValidationError

from dataset_builders.storage.files import check_database, write_json
from dataset_builders.storage.store import StorePath, absolute, side_dir
from stages.shared.launchers.processes import Owner

# Logins of Prefect's server and of its clients, `user:password`; the names by which browsers may call a server.
PREFECT_SECRET = "PREFECT_SERVER_API_AUTH_STRING"
PREFECT_CLIENT_SECRET = "PREFECT_API_AUTH_STRING"
NAMES_VARIABLE = "ATHANOR_HOST_NAMES"
POOL = "athanor"
NIGHTLY = "vlm-sft-nightly"  # the deployment that a schedule starts
FILES_VARIABLE = "ATHANOR_MLFLOW_FILES"  # the directory that `mlflow-artifacts:` of a root's own service stands for
DEFAULT_ROOT = "athanor-root"
SCHEMA_LOCK = "schema.lock"  # in Prefect's home, held while the tables of its database are made

DEFAULT_PORTS = {"prefect": 4200, "mlflow": 5000}


class ServiceRecord(Owner):
    """A running service, and the process that watches its programs.

    Attributes:
        root: the root that it serves, without links. A copy of the root has the record too, and is not served.
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


def mlflow_database(root: StorePath) -> Path:
    """Return the file of a root's own MLflow database."""
    return mlflow_files(root).with_name("mlflow.db")


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
    record = _running_record(root)
    return record if record is not None and record.root == str(absolute(root)) else None


def service_of_another(root: StorePath) -> ServiceRecord | None:
    """Return the record of a running service of another root, which lies in this root because this root is its copy."""
    record = _running_record(root)
    return record if record is not None and record.root != str(absolute(root)) else None


def _running_record(root: StorePath) -> ServiceRecord | None:
    try:
        values = json.loads((service_dir(root) / "service.json").read_text(encoding="utf-8"))
        record = ServiceRecord.model_validate(values)
    except (OSError, ValueError, ValidationError):
        return None  # there is no record, or it is of another version
    return record if record.host == socket.gethostname() and not record.is_dead() else None


@contextlib.contextmanager
def reserve_ports(directory: Path, host: str) -> Iterator[dict[str, int]]:
    """Choose a free port for each program: the port of last time, so that bookmarks keep working, else the usual port,
    else any port.

    While the block lasts, no other service of this machine chooses these ports. This matters because a server takes
    seconds until it listens.

    Yields:
        program -> its port.
    """
    last, chosen = DEFAULT_PORTS | recorded_ports(directory), {}
    with contextlib.ExitStack() as locks:
        for name, usual in DEFAULT_PORTS.items():
            candidates = [last[name], usual, *(any_port(host) for _ in range(5))]
            chosen[name] = next(port for port in candidates if is_free(host, port) and _lock(port, locks))
        write_json(directory / "ports.json", chosen)
        yield chosen


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()  # with SO_REUSEADDR two sockets may be bound to a port, but only one can listen
        except OSError:
            return False
    return True


def _lock(port: int, locks: contextlib.ExitStack) -> bool:
    try:
        locks.enter_context(filelock.FileLock(Path(tempfile.gettempdir(), f"athanor-port-{port}.lock"), timeout=0))
    except (filelock.Timeout, OSError):  # held by another service, or owned by another user
        return False
    return True


def any_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def kept_ports(directory: Path, host: str = "127.0.0.1") -> Mapping[str, int]:
    """Return program -> its recorded port. If the service never ran, choose ports that are free now and record them for
    its first start."""
    if not recorded_ports(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with reserve_ports(directory, host):
            pass
    return recorded_ports(directory)


def recorded_ports(directory: Path) -> Mapping[str, int]:
    """Return program -> its port of last time; empty if the service never ran."""
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((directory / "ports.json").read_text(encoding="utf-8"))
        return {name: values[name] for name in DEFAULT_PORTS if isinstance(values.get(name), int)}
    return {}


def past_the_proxy(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that keep calls to this machine's servers away from the proxy; empty if no proxy is set."""
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    if not any(name.lower() in proxies and value for name, value in environment.items()):
        return {}
    exceptions = environment.get("no_proxy") or environment.get("NO_PROXY")
    names = ",".join([*([exceptions] if exceptions else []), "127.0.0.1", "localhost", "::1"])
    return {"NO_PROXY": names, "no_proxy": names}
