"""The programs of a service: the command and the environment of each, and the check that it answers."""

import base64
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, side_dir
from flows import NO_TELEMETRY
from flows.libraries.mlflow_private import server_variables
from flows.prefect_server.access import (
    MLFLOW_PASSWORD,
    MLFLOW_USER,
    NAMES_VARIABLE,
    PREFECT_CLIENT_SECRET,
    PREFECT_SECRET,
    Access,
    mlflow_login,
    past_the_proxy,
)
from flows.prefect_server.home import prefect_home
from flows.prefect_server.processes import PART_VARIABLE, ROOT_VARIABLE, SERVICE_VARIABLE
from flows.prefect_server.service_record import FILES_VARIABLE, POOL, mlflow_files, service_dir

# Variables that the service's programs must not inherit, because they configure other servers or hold passwords.
_NOT_INHERITED = (
    *("PREFECT_API_URL", "PREFECT_UI_API_URL", "PREFECT_UI_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI"),
    *("MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT"),
    *("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"),
    *("MLFLOW_DEPLOYMENTS_TARGET", "PGPASSWORD", PREFECT_SECRET, PREFECT_CLIENT_SECRET, MLFLOW_USER, MLFLOW_PASSWORD),
    *("MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"),
    *("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"),
)
_ANSWER_SECONDS = 10.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy on the way to this machine


@dataclass(frozen=True, slots=True)
class Program:
    """One program of a service.

    Attributes:
        is_up: function of the time of the start, in seconds since 1970, that returns whether the program answers. May
            raise OSError.
        address: text that is shown to people.
        shares_session: whether processes that must outlive the program share its session, such as the flow runs of a
            killed worker, which save.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)
    log_path: Path
    is_up: Callable[[float], bool]
    address: str
    shares_session: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
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


def prefect_server(plan: Plan) -> Program:
    """Return Prefect's server, on the same database that `athanor run` uses without a service."""
    port = plan.ports["prefect"]
    environment = {
        **service_environment(plan.root, "prefect"),
        "PREFECT_API_URL": plan.prefect_api,
        "PREFECT_UI_API_URL": f"{plan.prefect_ui}/api",  # old and new name, since some versions read only one
        "PREFECT_SERVER_UI_API_URL": f"{plan.prefect_ui}/api",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # The browser test covers the nested and optional fields of the older form. The newer pages are still at /v2.
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "PREFECT__SERVER_FINAL": "1",  # set by `prefect server start` too; saves memory
        # By default leases are in memory. A killed server would forget who holds a slot, and never free it again.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in plan.access.names()),
        NAMES_VARIABLE: ",".join(plan.access.names()),
        PREFECT_SECRET: plan.access.prefect,
        PREFECT_CLIENT_SECRET: plan.access.prefect,
    }
    return Program(
        name="prefect",
        command=_uvicorn(plan, "prefect", "flows.prefect_server.prefect_app:make_app", "warning"),
        environment=environment,
        log_path=plan.log_path("prefect"),
        is_up=lambda _: _answers(f"{plan.prefect_api}/health"),
        address=plan.prefect_ui,
    )


def mlflow_server(plan: Plan) -> Program:
    """Return MLflow's server, on the store and the files that `athanor run` uses without a service.

    Clients on other machines read and write the files over HTTP. Commands on this machine do so in the root.
    """
    files = mlflow_files(plan.root)
    environment = {
        **service_environment(plan.root, "mlflow"),
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # jobs are for judges of generated text, and need more processes
        **server_variables(f"sqlite:///{files.with_name('mlflow.db')}", files.as_uri()),
        "MLFLOW_SERVER_ALLOWED_HOSTS": "*",  # the guard in front of the server checks the host names
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": plan.access.url(plan.ports["mlflow"]),
        NAMES_VARIABLE: ",".join(plan.access.names()),
        **mlflow_login(plan.access.mlflow),
    }
    return Program(
        name="mlflow",
        command=_uvicorn(plan, "mlflow", "flows.service.mlflow_app:make_app", "info"),
        environment=environment,
        log_path=plan.log_path("mlflow"),
        is_up=lambda _: _answers(f"{plan.mlflow}/health"),
        address=plan.access.url(plan.ports["mlflow"]),
    )


def _uvicorn(plan: Plan, part: str, factory: str, log_level: str) -> list[str]:
    place = ["--host", plan.access.host, "--port", str(plan.ports[part]), "--log-level", log_level]
    return [sys.executable, "-m", "uvicorn", "--factory", factory, *place]


def worker(plan: Plan) -> Program:
    """Return the worker. It registers deployments and limits, settles the runs of dead processes, and takes flow runs.

    Each flow run gets a process of its own, which inherits the worker's environment.
    """
    name = f"athanor-{socket.gethostname()}-{os.getpid()}"  # reconcile.py recognises lost runs by this name
    limits = [word for limit, slots in plan.limits.items() for word in ("--limit", f"{limit}={slots}")]
    return Program(
        name="worker",
        command=[sys.executable, "-m", "flows.service.work", "--name", name, "--max-runs", str(plan.max_runs), *limits],
        environment={
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "7",
            **client_environment(plan, "worker"),
        },
        log_path=plan.log_path("worker"),
        is_up=lambda started: _worker_is_online(plan, name, started),
        address=f"up to {plan.max_runs} flow runs at a time",
        shares_session=True,
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


def service_environment(root: StorePath, part: str) -> dict[str, str]:
    """Return the environment of every process of the service: this process's own without secrets, and the mark."""
    side = side_dir(root)
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    fixed = {
        SERVICE_VARIABLE: str(side),
        PART_VARIABLE: part,
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


def client_environment(plan: Plan, part: str) -> dict[str, str]:
    """Return the environment of a process that calls the servers."""
    return {
        **service_environment(plan.root, part),
        "PREFECT_API_URL": plan.prefect_api,
        "PREFECT_UI_URL": plan.prefect_ui,
        "MLFLOW_TRACKING_URI": plan.mlflow,
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        FILES_VARIABLE: str(mlflow_files(plan.root)),
        PREFECT_CLIENT_SECRET: plan.access.prefect,
        **mlflow_login(plan.access.mlflow),
    }


def _answers(url: str) -> bool:
    """Whether a server reports that it is healthy."""
    with _OPENER.open(url, timeout=_ANSWER_SECONDS) as answer:
        return answer.status == 200


def _worker_is_online(plan: Plan, name: str, started: float) -> bool:
    """Whether the server has had a heartbeat of the worker since the worker's start."""
    login = base64.b64encode(plan.access.prefect.encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    url = f"{plan.prefect_api}/work_pools/{POOL}/workers/filter"
    request = urllib.request.Request(url, b"{}", headers, method="POST")
    with _OPENER.open(request, timeout=_ANSWER_SECONDS) as answer:
        workers = json.load(answer)
    ours = [entry for entry in workers if entry["name"] == name and entry["status"] == "ONLINE"]
    return any(datetime.fromisoformat(entry["last_heartbeat_time"]).timestamp() >= started for entry in ours)
