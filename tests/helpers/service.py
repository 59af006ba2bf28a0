"""A running `athanor up` for tests: a process of its own on a temporary root."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flows.pipeline.processes import SERVICE_VARIABLE
from flows.service.access import client_logins
from flows.tracking.servers import PREFECT_CLIENT_SECRET, ServiceRecord, is_free, read_service, service_dir
from tests.helpers.patience import at_most, wait_for
from tests.helpers.small_run import SMALL

__all__ = ["wait_for"]

READY_SECONDS = 180.0
STOP_SECONDS = 60.0
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")  # states of a flow run
_FOREIGN = ("PREFECT_", "MLFLOW_", "ATHANOR_", "PGPASSWORD")


class RunningService:
    """An `athanor up` that runs on a root.

    Attributes:
        root: root of the service; its logs are in root/service.
        record: the service's record.
        process: the process that watches the programs.
        output: file with everything that it has printed.
    """

    def __init__(
        self,
        root: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        ready: bool = True,
    ) -> None:
        self.root, self.output = root, root.with_name(f"{root.name}-up.txt")
        self._given = dict(environment or {})
        command = [sys.executable, "-m", "flows.cli.main", "up", "--root", str(root), *options]
        _choose_own_ports(root / "service" / "ports.json")
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **self._given},
                start_new_session=True,
            )
        self.record: ServiceRecord | None = None
        if ready:
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise

    def wait_ready(self, seconds: float = READY_SECONDS) -> ServiceRecord:
        deadline = time.monotonic() + at_most(seconds)
        while (record := read_service(self.root)) is None or record.pid != self.process.pid:
            assert self.process.poll() is None, f"athanor up ended by itself:\n{self.tell()}"
            assert time.monotonic() < deadline, (
                f"athanor up was not ready within {at_most(seconds):.0f} s:\n{self.tell()}"
            )
            time.sleep(0.1)
        self.record = record
        return record

    def env(self) -> dict[str, str]:
        """Return the environment for a process that calls the service's servers."""
        return {
            **clean_environment(),
            "PREFECT_HOME": str(self.root / "prefect"),
            "PREFECT_API_URL": self.record.prefect_api,
            "MLFLOW_TRACKING_URI": self.record.mlflow,
            "ATHANOR_ROOT": str(self.root),
            **client_logins(service_dir(self.root), {}),
        }

    @property
    def login(self) -> str:
        """Return `user:password` of Prefect's server, as athanor's own commands find it."""
        found = self._given.get(PREFECT_CLIENT_SECRET)
        return found or client_logins(service_dir(self.root), {})[PREFECT_CLIENT_SECRET]

    def ask(self, url: str, body: object = None, *, login: str = "", method: str | None = None) -> Any:
        """Return a server's answer as JSON, with the password in the request.

        Raises:
            HTTPError: the status is not one of success.
        """
        with _open(url, body, login or self.login, method, {}) as answer:
            return json.loads(answer.read() or "null")

    def prefect(self, path: str, body: object = None, method: str | None = None) -> Any:
        """Return an answer of Prefect's API. Repeat the request while the database is busy (503), as Prefect's own
        client does."""

        def answer() -> list | None:
            try:
                return [self.ask(self.record.prefect_api + path, body, method=method)]
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                return None

        return wait_for(answer, 120, f"answer for {path}", self.tell)[0]

    def deployment(self, name: str) -> dict[str, Any]:
        (found,) = self.prefect("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return found

    def start_run(self, deployment: str, settings: Mapping[str, object], **more: object) -> str:
        """Ask for a run of a deployment with dotted settings, as the UI does. Return the run's id."""
        path = f"/deployments/{self.deployment(deployment)['id']}/create_flow_run"
        parameters = {"recipe": "embedded", "set": lines(settings)}
        return self.prefect(path, {"parameters": parameters, **more})["id"]

    def end_of(self, run_id: object, seconds: float) -> dict[str, Any]:
        """Wait until a flow run has a final state, and return it."""

        def ended() -> dict | None:
            run = self.prefect(f"/flow_runs/{run_id}")
            return run if run["state_type"] in ENDED else None

        return wait_for(ended, seconds, f"end of flow run {run_id}", self.tell)

    def mlflow_runs(self, login: str = "") -> list[dict[str, Any]]:
        """Return the runs of the recipe `embedded` in MLflow."""
        api = f"{self.record.mlflow}/api/2.0/mlflow"
        found = self.ask(f"{api}/experiments/get-by-name?experiment_name=athanor-embedded", login=login)["experiment"]
        return self.ask(f"{api}/runs/search", {"experiment_ids": [found["experiment_id"]]}, login=login).get("runs", [])

    def program(self, part: str) -> psutil.Process | None:
        """Return the process of the worker or of a server that `athanor up` has started itself, while it is running."""
        try:
            pid = json.loads((self.root / "service" / f"{part}.pid").read_text())["pid"]
        except (OSError, ValueError):
            return None
        started = psutil.Process(self.process.pid).children()
        return next((one for one in started if one.pid == pid and one.status() != psutil.STATUS_ZOMBIE), None)

    def athanor(self, command: str, *arguments: str, **changes: object) -> subprocess.CompletedProcess:
        """Run an athanor command on the root. A recipe gets the quick settings."""
        return run_athanor(command, self.root, *arguments, **changes)

    def stop(self, signum: int = signal.SIGINT) -> int:
        """Stop the service as Ctrl-C does, and return the exit status. May be called again."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
            try:
                self.process.wait(at_most(STOP_SECONDS))
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(
                    f"athanor up did not stop within {at_most(STOP_SECONDS):.0f} s:\n{self.tell()}"
                ) from None
        return self.process.returncode

    def kill(self) -> None:
        """Kill -9 the process that watches the programs."""
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return all processes with the service's mark, except the one that watches."""
        return processes_with(SERVICE_VARIABLE, str(self.root))

    def log(self, part: str) -> str:
        path = self.root / "service" / f"{part}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def tell(self) -> str:
        """Return the output and the ends of the logs, for a failed assertion."""
        logs = {part: self.log(part)[-1500:] for part in ("prefect", "mlflow", "worker")}
        return "\n".join([self.output.read_text(errors="replace")[-3000:], *(f"== {k}\n{v}" for k, v in logs.items())])

    def printed(self) -> list[str]:
        return self.output.read_text(encoding="utf-8").splitlines()


@contextmanager
def running_service(
    root: Path, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[RunningService]:
    """Run a service. It is stopped at the end, and no process may be left."""
    running = RunningService(root, options, environment)
    try:
        yield running
    finally:
        running.stop()
    assert not running.processes(), f"left behind: {running.processes()}\n{running.tell()}"


def request(
    url: str, body: object = None, *, login: str | None = None, method: str | None = None, **headers: str
) -> tuple[int, bytes]:
    """Return (status, answer) of a request, which has a password only if a login is given."""
    try:
        with _open(url, body, login, method, headers) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _open(url: str, body: object, login: str | None, method: str | None, headers: Mapping[str, str]) -> Any:
    sent = {"Content-Type": "application/json", **headers}
    if login is not None:
        sent["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, sent, method=method), timeout=at_most(60))


def answers(url: str) -> bool:
    try:
        return request(url)[0] == 200
    except OSError:
        return False


def _choose_own_ports(path: Path) -> None:
    """Record ports as if the service had run before, since the usual ports may be taken, and the system hands out ports
    above 32768."""
    if path.exists():
        return
    free = [port for port in random.sample(range(20_000, 30_000), 20) if is_free("127.0.0.1", port)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"prefect": free[0], "mlflow": free[1]}))


def run_athanor(command: str, root: Path, *arguments: str, **changes: object) -> subprocess.CompletedProcess:
    """Run `athanor command` in a process of its own, with text output. Changes are dotted settings, with __ for the
    dot."""
    sets = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    words = [f"--set={key}={value}" for key, value in sets.items()] if command in ("run", "plan", "sweep") else []
    full = [sys.executable, "-m", "flows.cli.main", command, *arguments, "--root", str(root), *words]
    return subprocess.run(full, env=clean_environment(), capture_output=True, text=True, timeout=at_most(280))


def lines(settings: Mapping[str, object]) -> str:
    """Return {"a.b": 1, "c": 2} as a.b=1 and c=2 in two lines, the form of a request's `set`."""
    return "\n".join(f"{dotted}={json.dumps(value)}" for dotted, value in settings.items())


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that name other servers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes that have a variable in their environment, without zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
