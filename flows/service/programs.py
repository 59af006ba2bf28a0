"""The programs of a service: how each is started, with which settings, and how one sees that it answers."""

import json
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from dataset_builders.contracts.store import StorePath, side_dir
from flows.service.access import (
    MLFLOW_PASSWORD,
    MLFLOW_USER,
    PREFECT_CLIENT_SECRET,
    PREFECT_SECRET,
    Access,
    allowed_hosts,
    mlflow_auth_environment,
    past_the_proxy,
    prefect_auth_header,
)
from flows.service.database import DATABASE_VARIABLE, PASSWORD_VARIABLE, Postgres
from flows.service.prefect_home import prefect_home
from flows.service.processes import PART_VARIABLE, ROOT_VARIABLE, SERVICE_VARIABLE
from flows.service.record import POOL, service_dir

# Which server another program of the person's talks to is not for ours to inherit.
_NOT_INHERITED = (
    *("PREFECT_API_URL", "PREFECT_UI_API_URL", "PREFECT_UI_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI"),
    *("MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT"),
    *("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"),
    *(DATABASE_VARIABLE, PASSWORD_VARIABLE, PREFECT_SECRET, PREFECT_CLIENT_SECRET, MLFLOW_USER, MLFLOW_PASSWORD),
    *("MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"),
)
_ANSWER_SECONDS = 5.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy on the way to this machine


@dataclass(frozen=True, slots=True)
class Program:
    """One program of a service.

    Attributes:
        is_up: whether it answers; gets the moment at which it was started, seconds since 1970. May raise OSError.
        address: for a person.
        needs: name of the program that has to answer first.
        lasts: False for one that does its work and ends.
        shares_session: with processes that outlive it and save: flow runs, when their worker is killed.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)
    log_path: Path
    is_up: Callable[[float], bool]
    address: str = ""
    needs: str | None = None
    lasts: bool = True
    shares_session: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a service of a root is made of.

    Attributes:
        ports: "prefect" and "mlflow".
        max_runs: flow runs at a time.
        limits: slots of named concurrency limits.
    """

    root: StorePath
    access: Access
    ports: Mapping[str, int]
    database: Postgres | None
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
    """Its database is the one that `athanor run` uses without a service, unless there is a Postgres."""
    port = str(plan.ports["prefect"])
    environment = {
        **service_environment(plan.root, "prefect"),
        "PREFECT_API_URL": plan.prefect_api,
        "PREFECT_UI_API_URL": f"{plan.prefect_ui}/api",  # the old name and the new: either alone has been missed
        "PREFECT_SERVER_UI_API_URL": f"{plan.prefect_ui}/api",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # In memory, its default, a killed server forgets who holds a slot, and the slot is never free again.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        **_prefect_secret(plan.access, (PREFECT_SECRET, PREFECT_CLIENT_SECRET)),
        **(plan.database.environment("prefect") if plan.database else {}),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", plan.access.host, "--port", port]
    return Program(
        name="prefect",
        command=command,
        environment=environment,
        log_path=plan.log_path("prefect"),
        is_up=lambda _: _answers(f"{plan.prefect_api}/health"),
        address=plan.prefect_ui,
    )


def mlflow_server(plan: Plan) -> Program:
    """Its store and its files are those of `athanor run` without a service, unless there is a Postgres.

    It hands out no files by itself: clients are on this machine, and read and write them below the root.
    """
    side = side_dir(plan.root).resolve()
    sqlite = {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{side / 'mlflow.db'}"}
    has_auth = plan.access.has_mlflow_auth
    environment = {
        **service_environment(plan.root, "mlflow"),
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes of its own, for judges of generated text
        **(plan.database.environment("mlflow") if plan.database else sqlite),
        **(mlflow_auth_environment(service_dir(plan.root)) if has_auth else {}),
    }
    options = {
        "--host": plan.access.host,
        "--port": str(plan.ports["mlflow"]),
        "--workers": "1",
        "--default-artifact-root": (side / "mlflow-artifacts").as_uri(),
        "--allowed-hosts": allowed_hosts(plan.access),
        "--cors-allowed-origins": plan.access.url(plan.ports["mlflow"]),
        **({"--app-name": "basic-auth"} if has_auth else {}),
    }
    words = [word for option in options.items() for word in option]
    return Program(
        name="mlflow",
        command=[sys.executable, "-m", "mlflow", "server", *words, "--no-serve-artifacts"],
        environment=environment,
        log_path=plan.log_path("mlflow"),
        is_up=lambda _: _answers(f"{plan.mlflow}/health"),
        address=plan.access.url(plan.ports["mlflow"]),
    )


def worker(plan: Plan) -> Program:
    """Takes flow runs from the pool and gives each a process; they inherit its environment."""
    name = f"athanor-{socket.gethostname()}-{os.getpid()}"  # reconcile.py tells by it whose runs are lost
    command = ["-m", "flows.service.work", "worker", "start", "--pool", POOL, "--type", "process", "--name", name]
    environment = {"PREFECT_WORKER_QUERY_SECONDS": "3", **client_environment(plan, "worker")}
    return Program(
        name="worker",
        command=[sys.executable, *command],
        environment=environment,
        log_path=plan.log_path("worker"),
        is_up=lambda started: _worker_is_online(plan, name, started),
        address=f"up to {plan.max_runs} flow runs at a time",
        needs="prefect",
        shares_session=True,
    )


def provision(plan: Plan, *, is_first: bool) -> Program:
    """Makes the server know deployments and limits, and puts right what dead processes left; see provision.py."""
    command = [sys.executable, "-m", "flows.service.provision", *([] if is_first else ["--reconcile-only"])]
    words = [word for name, slots in plan.limits.items() for word in ("--limit", f"{name}={slots}")]
    words += ["--max-runs", str(plan.max_runs)]
    return Program(
        name="deployments",
        command=[*command, *(words if is_first else [])],
        environment=client_environment(plan, "provision"),
        log_path=plan.log_path("provision"),
        is_up=lambda _: True,
        needs=None if is_first else "prefect",  # at first it loads its libraries while the server starts
        lasts=False,
    )


def service_environment(root: StorePath, part: str) -> dict[str, str]:
    """What every process of the service has: this process's own environment without secrets, and the mark."""
    side = side_dir(root)
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    fixed = {
        SERVICE_VARIABLE: str(side),
        PART_VARIABLE: part,
        ROOT_VARIABLE: str(root),
        "PREFECT_HOME": str(prefect_home(root)),
        "DO_NOT_TRACK": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PYTHONUNBUFFERED": "1",
        "TERM": "dumb",
        "COLUMNS": "200",
    }
    # The command line keeps Prefect quiet; here its lines go to a log.
    levels = ("LEVEL", "FLOW_RUNS_LEVEL", "TASK_RUNS_LEVEL")
    console = {f"PREFECT_LOGGING_HANDLERS_CONSOLE_{level}": "INFO" for level in levels}
    return {**inherited, **past_the_proxy(inherited), **console, **fixed}


def client_environment(plan: Plan, part: str) -> dict[str, str]:
    """What a process has that talks to the servers."""
    names = (MLFLOW_USER, MLFLOW_PASSWORD) if plan.access.has_mlflow_auth else ()
    return {
        **service_environment(plan.root, part),
        "PREFECT_API_URL": plan.prefect_api,
        "PREFECT_UI_URL": plan.prefect_ui,
        "MLFLOW_TRACKING_URI": plan.mlflow,
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        **_prefect_secret(plan.access, (PREFECT_CLIENT_SECRET,)),
        **{name: os.environ[name] for name in names},
    }


def _prefect_secret(access: Access, names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[PREFECT_SECRET] for name in names} if access.has_prefect_auth else {}


def _answers(url: str) -> bool:
    """Whether a server says that it is well."""
    with _OPENER.open(url, timeout=_ANSWER_SECONDS) as answer:
        return answer.status == 200


def _worker_is_online(plan: Plan, name: str, started: float) -> bool:
    """Whether the server has heard of a worker since it was started."""
    headers = {"Content-Type": "application/json", **prefect_auth_header()}
    url = f"{plan.prefect_api}/work_pools/{POOL}/workers/filter"
    request = urllib.request.Request(url, b"{}", headers, method="POST")
    with _OPENER.open(request, timeout=_ANSWER_SECONDS) as answer:
        workers = json.load(answer)
    ours = [found for found in workers if found["name"] == name and found["status"] == "ONLINE"]
    return any(datetime.fromisoformat(found["last_heartbeat_time"]).timestamp() >= started for found in ours)
