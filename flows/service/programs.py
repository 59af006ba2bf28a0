"""The programs of a service: the command and the environment of each, and the check that it answers."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, side_dir
from flows import NO_TELEMETRY
from flows.libraries.mlflow_private import server_variables
from flows.pipeline.processes import ROOT_VARIABLE, SERVICE_VARIABLE, answer_of, server_command
from flows.service.access import MLFLOW_PASSWORD, MLFLOW_USER, Access, mlflow_login
from flows.tracking.servers import (
    FILES_VARIABLE,
    NAMES_VARIABLE,
    POOL,
    PREFECT_CLIENT_SECRET,
    PREFECT_SECRET,
    mlflow_database,
    mlflow_files,
    past_the_proxy,
    prefect_home,
    service_dir,
)

# Variables that the service's programs must not inherit, because they configure other servers or hold passwords.
_NOT_INHERITED = (
    *("PREFECT_API_URL", "PREFECT_UI_API_URL", "PREFECT_UI_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI"),
    *("MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT"),
    *("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"),
    *("MLFLOW_DEPLOYMENTS_TARGET", "PGPASSWORD", PREFECT_SECRET, PREFECT_CLIENT_SECRET, MLFLOW_USER, MLFLOW_PASSWORD),
    *("MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"),
    *("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"),
)


SILENT_SECONDS = 60.0  # age of a worker's last heartbeat from which it is told; a worker sends one every 7 seconds


@dataclass(slots=True)
class Program:
    """One program of a service, and its process. Times are from time.monotonic(), except `started`.

    Attributes:
        answers: function of the program that returns whether it answers now.
        address: text that is shown to people.
        heartbeat: function that returns the time of the program's last heartbeat, or None if nobody knows it. A program
            with heartbeats that falls silent is told of and left alone, and not killed as a server is.
        is_silent: whether that was told.
        process: None while the program waits for its restart.
        started: time of the process's start, in seconds since 1970.
        since: time of the process's start or, once it has answered, of its first answer.
        answered: time of its last answer.
        next_at: earliest time of the next start or of the next health check.
        deaths: number of deaths in a row.
        starts: number of starts in all.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)
    log_path: Path
    answers: Callable[["Program"], bool]
    address: str
    heartbeat: Callable[[], datetime | None] | None = None
    is_silent: bool = False
    process: subprocess.Popen | None = None
    is_ready: bool = False
    was_ready: bool = False
    started: float = 0.0
    since: float = 0.0
    answered: float = 0.0
    next_at: float = 0.0
    deaths: int = 0
    starts: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """The settings of a root's service.

    Attributes:
        ports: "prefect" and "mlflow" -> port.
        max_runs: number of flow runs at a time.
        limits: name of a concurrency limit -> number of slots.
    """

    root: StorePath
    access: Access
    ports: Mapping[str, int]
    max_runs: int
    limits: Mapping[str, int]

    @property
    def prefect_ui(self) -> str:
        return self.access.url(self.ports["prefect"])

    @property
    def prefect_api(self) -> str:
        return self.access.url(self.ports["prefect"], local=True) + "/api"

    @property
    def mlflow(self) -> str:
        return self.access.url(self.ports["mlflow"], local=True)

    def log_path(self, part: str) -> Path:
        return service_dir(self.root) / f"{part}.log"


def prefect_server(service: Service) -> Program:
    """Return Prefect's server, on the same database that `athanor run` uses without a service."""
    port = service.ports["prefect"]
    environment = {
        **service_environment(service.root),
        "PREFECT_API_URL": service.prefect_api,
        "PREFECT_UI_API_URL": f"{service.prefect_ui}/api",  # old and new name, since some versions read only one
        "PREFECT_SERVER_UI_API_URL": f"{service.prefect_ui}/api",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # The browser test covers the nested and optional fields of the older form. The newer pages are still at /v2.
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT__SERVER_FINAL": "1",  # set by `prefect server start` too; saves memory
        # By default leases are in memory. A killed server would forget who holds a slot, and never free it again.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in service.access.names()),
        NAMES_VARIABLE: ",".join(service.access.names()),
        PREFECT_SECRET: service.access.prefect,
        PREFECT_CLIENT_SECRET: service.access.prefect,
    }
    factory = "flows.service.prefect_app:make_app"
    return Program(
        name="prefect",
        command=server_command(factory, service.access.host, port, "--log-level", "warning"),
        environment=environment,
        log_path=service.log_path("prefect"),
        answers=lambda _: answer_of(f"{service.prefect_api}/health") is not None,
        address=service.prefect_ui,
    )


def mlflow_server(service: Service) -> Program:
    """Return MLflow's server, on the store and the files that `athanor run` uses without a service.

    Clients on other machines read and write the files over HTTP. Commands on this machine do so in the root.
    """
    port, files = service.ports["mlflow"], mlflow_files(service.root)
    environment = {
        **service_environment(service.root),
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # jobs are for judges of generated text, and need more processes
        **server_variables(f"sqlite:///{mlflow_database(service.root)}", files.as_uri()),
        "MLFLOW_SERVER_ALLOWED_HOSTS": "*",  # the guard in front of the server checks the host names
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": service.access.url(port),
        NAMES_VARIABLE: ",".join(service.access.names()),
        **mlflow_login(service.access.mlflow),
    }
    return Program(
        name="mlflow",
        command=server_command("flows.service.mlflow_app:make_app", service.access.host, port, "--log-level", "info"),
        environment=environment,
        log_path=service.log_path("mlflow"),
        answers=lambda _: answer_of(f"{service.mlflow}/health") is not None,
        address=service.access.url(port),
    )


def worker(service: Service) -> Program:
    """Return the worker. It registers deployments and limits, settles the runs of dead processes, and takes flow runs.

    Each flow run gets a process of its own, which inherits the worker's environment.
    """
    name = worker_name(os.getpid())
    limits = [word for limit, slots in service.limits.items() for word in ("--limit", f"{limit}={slots}")]
    environment = {
        **service_environment(service.root),
        "PREFECT_API_URL": service.prefect_api,
        "PREFECT_UI_URL": service.prefect_ui,
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "7",
        "MLFLOW_TRACKING_URI": service.mlflow,
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        FILES_VARIABLE: str(mlflow_files(service.root)),
        PREFECT_CLIENT_SECRET: service.access.prefect,
        **mlflow_login(service.access.mlflow),
    }

    def heartbeat() -> datetime | None:
        return last_heartbeat(service.prefect_api, service.access.prefect, name)

    return Program(
        name="worker",
        command=[
            sys.executable,
            "-m",
            "flows.service.work",
            "--name",
            name,
            "--max-runs",
            str(service.max_runs),
            *limits,
        ],
        environment=environment,
        log_path=service.log_path("worker"),
        answers=lambda program: (beat := heartbeat()) is not None and beat.timestamp() >= program.started,
        address=f"up to {service.max_runs} flow runs at a time",
        heartbeat=heartbeat,  # it is not killed for its silence, since its flow runs would end with it
    )


def parse_limits(texts: Sequence[str]) -> dict[str, int]:
    """Parse limits: ["gpu=2"] -> {"gpu": 2}.

    Raises:
        InputError: a text is not of this form, or gives less than one slot.
    """
    limits = {}
    for text in texts:
        name, _, slots = text.rpartition("=")
        if not (name and slots.isdecimal() and int(slots) > 0):
            raise InputError(f"--limit {text} is not NAME=SLOTS with 1 slot or more; for example --limit local=1")
        limits[name] = int(slots)
    return limits


def service_environment(root: StorePath) -> dict[str, str]:
    """Return the environment of every process of the service: this process's own without secrets, and the mark."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    fixed = {
        SERVICE_VARIABLE: str(side_dir(root)),
        ROOT_VARIABLE: str(root),
        "PREFECT_HOME": str(prefect_home(root)),
        **NO_TELEMETRY,
        "PYTHONUNBUFFERED": "1",
        "TERM": "dumb",
        "COLUMNS": "200",
    }
    # The command line silences Prefect's console output. The service turns it on again, since it goes to a log file.
    levels = ("LEVEL", "FLOW_RUNS_LEVEL", "TASK_RUNS_LEVEL")
    console = {f"PREFECT_LOGGING_HANDLERS_CONSOLE_{level}": "INFO" for level in levels}
    return {**inherited, **past_the_proxy(inherited), **console, **fixed}


def worker_name(pid: int) -> str:
    """Return the name of the worker of this machine's service with a process id. `reconcile.py` reads such names."""
    return f"athanor-{socket.gethostname()}-{pid}"


def last_heartbeat(prefect_api: str, login: str, worker: str) -> datetime | None:
    """Return the time of a worker's last heartbeat; None if Prefect's server knows none, or does not answer.

    Args:
        login: `user:password` of the server.
    """
    entries = ask_prefect(prefect_api, login, f"work_pools/{POOL}/workers/filter")
    with contextlib.suppress(ValueError, KeyError):  # another program has the port, and answers otherwise
        texts = [entry["last_heartbeat_time"] for entry in entries if entry["name"] == worker]
        return max((datetime.fromisoformat(text) for text in texts if text), default=None)
    return None


def ask_prefect(prefect_api: str, login: str, path: str) -> list[dict[str, Any]]:
    """Return what a search of Prefect's server finds; nothing if the server does not answer with a list.

    Args:
        login: `user:password` of the server.
    """
    encoded = base64.b64encode(login.encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {encoded}"}
    with contextlib.suppress(ValueError):
        found = json.loads(answer_of(f"{prefect_api}/{path}", b"{}", headers) or "[]")
        return found if isinstance(found, list) else []
    return []


def silence(beat: datetime | None) -> str:
    """Return `no heartbeat since 2026-01-31 09:30:00 UTC` if the last heartbeat of a worker is more than SILENT_SECONDS
    old; empty if it is not, or if nobody knows it."""
    if beat is None or time.time() - beat.timestamp() <= SILENT_SECONDS:
        return ""
    return f"no heartbeat since {beat.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
