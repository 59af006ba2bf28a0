"""Both servers with passwords from the environment: nobody gets in without them, a run succeeds, and no file or command
line shows them."""

import asyncio
import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import websockets

from flows.prefect_server.processes import service_processes
from flows.prefect_server.service_record import ServiceRecord
from tests.helpers.canary import SECRETS, assert_nowhere, environment
from tests.helpers.command_lines import seen_command_lines
from tests.helpers.service import RunningService, nested
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "Secrets appear in no file, log, database or command line of a run, servers ask for a login, and no "
        "foreign pickle or code runs."
    ),
]

MLFLOW_USER = "somebody"
PREFECT = SECRETS["PREFECT_SERVER_API_AUTH_STRING"]
MLFLOW = f"{MLFLOW_USER}:{SECRETS['MLFLOW_TRACKING_PASSWORD']}"
RUN = 600  # seconds
OVERRIDES = {**SMALL, "train.num_steps": 3}


@dataclass
class Guarded:
    """A service that requires passwords. `place` holds all files that it and its clients write."""

    place: Path
    record: ServiceRecord
    seen: set[bytes]

    @property
    def root(self) -> Path:
        return self.place / "root"

    def call(self, url: str, login: str | None, body: object = None) -> tuple[int, bytes]:
        """Return (status, answer)."""
        headers = {"Content-Type": "application/json"}
        if login is not None:
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def prefect(self, path: str, body: object = None) -> object:
        """Return the server's answer. A 503 means that the database is locked, and Prefect's own client then asks
        again."""
        for _ in range(30):
            status, answer = self.call(self.record.prefect_api + path, PREFECT, body)
            if status != 503:
                break
            time.sleep(2)
        assert status < 300, answer
        return json.loads(answer)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    place = tmp_path_factory.mktemp("guarded")
    with seen_command_lines() as seen:
        running = RunningService(place / "root", environment=own_environment(place))
        try:
            yield Guarded(place, running.record, seen)
        finally:
            running.stop()
    assert not running.processes(), running.tell()


def own_environment(place: Path) -> dict[str, str]:
    return {**environment(place), "MLFLOW_TRACKING_USERNAME": MLFLOW_USER}


PREFECT_CALLS = {
    "a list": ("/flow_runs/filter", {}),
    "the version": ("/admin/version", None),
    "the settings": ("/admin/settings", None),
    "deployments": ("/deployments/filter", {}),
    "variables": ("/variables/filter", {}),
    "no such page": ("/nowhere", None),
}
MLFLOW_CALLS = {
    "experiments": ("/api/2.0/mlflow/experiments/search", {"max_results": 5}),
    "the page's own": ("/ajax-api/2.0/mlflow/experiments/search", {"max_results": 5}),
    "models": ("/api/2.0/mlflow/registered-models/search", None),
    "files": ("/api/2.0/mlflow-artifacts/artifacts", None),
    "users": ("/api/2.0/mlflow/users/get?username=admin", None),
    "the page": ("/", None),
    "the version": ("/version", None),
    "a picture of a run": ("/get-artifact?run_uuid=1&path=x.png", None),
}
WRONG = [None, "", ":", "admin:", "admin:password1234", PREFECT + "x", MLFLOW.upper()]
wrong_logins = pytest.mark.parametrize("login", WRONG, ids=range(len(WRONG)))  # passwords differ per process


@pytest.mark.parametrize("what", PREFECT_CALLS)
@wrong_logins
def test_prefect_answers_nobody_without_its_password(guarded, what, login):
    path, body = PREFECT_CALLS[what]
    status, answer = guarded.call(guarded.record.prefect_api + path, login, body)
    assert status == 401 and b"Unauthorized" in answer


@pytest.mark.parametrize("what", MLFLOW_CALLS)
@wrong_logins
def test_mlflow_answers_nobody_without_its_password(guarded, what, login):
    path, body = MLFLOW_CALLS[what]
    assert guarded.call(guarded.record.mlflow + path, login, body)[0] == 401


def test_both_answer_with_it(guarded):
    assert isinstance(guarded.prefect("/flow_runs/filter", {}), list)
    status, answer = guarded.call(
        guarded.record.mlflow + "/api/2.0/mlflow/experiments/search", MLFLOW, {"max_results": 5}
    )
    assert status == 200 and b"experiments" in answer


async def talk(url: str, first: object, subprotocols: list[str] | None) -> str:
    """Send a first message to a websocket. Return the answer, or the way in which the websocket was closed."""
    try:
        async with websockets.connect(url, subprotocols=subprotocols, open_timeout=30) as socket:
            await socket.send(json.dumps(first))
            return await asyncio.wait_for(socket.recv(), 30)
    except websockets.ConnectionClosed as closed:
        return f"closed {closed.rcvd.code if closed.rcvd else ''}"
    except websockets.InvalidStatus as refused:
        return f"refused {refused.response.status_code}"


@pytest.mark.parametrize("place", ["/events/in", "/events/out", "/logs/out"])
@pytest.mark.parametrize(
    ("first", "subprotocols"),
    [
        ({"type": "auth"}, ["prefect"]),
        ({"type": "auth", "token": ""}, ["prefect"]),
        ({"type": "auth", "token": "admin:admin"}, ["prefect"]),
        ({"type": "filter", "filter": {}}, ["prefect"]),
        ({"type": "filter", "filter": {}}, None),
        ({"type": "filter", "filter": {}}, ["other"]),
    ],
)
def test_prefects_streams_ask_too(guarded, place, first, subprotocols):
    """In 3.2.14 the streams had no password check (PrefectHQ/prefect#17687). In 3.8.8 a client from before that
    protocol (no subprotocol) is refused, and other clients must send the password as their first message."""
    url = guarded.record.prefect_api.replace("http", "ws", 1) + place
    assert asyncio.run(talk(url, first, subprotocols)) in ("closed 1008", "closed 1002", "refused 403")


@pytest.mark.parametrize("place", ["/events/in", "/events/out", "/logs/out"])
def test_prefects_streams_open_with_the_password(guarded, place):
    url = guarded.record.prefect_api.replace("http", "ws", 1) + place
    answer = asyncio.run(talk(url, {"type": "auth", "token": PREFECT}, ["prefect"]))
    assert json.loads(answer)["type"] == "auth_success"


def test_everything_listens_on_this_machine_alone(guarded):
    own = [psutil.Process(guarded.record.pid), *service_processes(guarded.root)]
    listening = {c.laddr for p in own for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    ports = {int(url.split(":")[2].split("/")[0]) for url in (guarded.record.prefect_api, guarded.record.mlflow)}
    assert ports <= {address.port for address in listening}
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


def test_mlflows_pickle_switch_is_off(guarded):
    """This holds for the server and for every process that logs to it."""
    environments = [process.environ() for process in service_processes(guarded.root)]
    servers = [each for each in environments if each.get("ATHANOR_SERVICE_PART") == "mlflow"]
    assert servers and {each.get("MLFLOW_ALLOW_PICKLE_DESERIALIZATION") for each in servers} == {"false"}


def test_servers_do_not_know_each_others_passwords(guarded):
    for part, own, others in (
        ("prefect", "PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"),
        ("mlflow", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING"),
    ):
        environments = [process.environ() for process in service_processes(guarded.root, part)]
        assert environments and all(own in each and others not in each for each in environments)


@pytest.fixture(scope="module")
def triggered(guarded) -> dict:
    """Start a run through the Prefect server, and return it when it has ended."""
    (deployment,) = guarded.prefect("/deployments/filter", {"deployments": {"name": {"any_": ["vlm-sft"]}}})
    body = {"parameters": {"recipe": "embedded", "overrides": nested(OVERRIDES)}}
    run = guarded.prefect(f"/deployments/{deployment['id']}/create_flow_run", body)
    deadline = time.monotonic() + RUN
    while run["state_type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
        assert time.monotonic() < deadline, run["state_name"]
        time.sleep(0.5)
        run = guarded.prefect(f"/flow_runs/{run['id']}")
    return run


def test_a_run_of_the_service_completes(guarded, triggered):
    assert triggered["state_type"] == "COMPLETED", triggered["state"]["message"]
    assert finished_runs(guarded) >= 1


def finished_runs(guarded: Guarded) -> int:
    url = guarded.record.mlflow + "/api/2.0/mlflow/experiments/get-by-name?experiment_name=athanor-embedded"
    experiment = json.loads(guarded.call(url, MLFLOW)[1])["experiment"]["experiment_id"]
    search = {"experiment_ids": [experiment], "filter": "attributes.status = 'FINISHED'"}
    status, answer = guarded.call(guarded.record.mlflow + "/api/2.0/mlflow/runs/search", MLFLOW, search)
    assert status == 200
    return len(json.loads(answer).get("runs", []))


def athanor_run(guarded: Guarded) -> subprocess.CompletedProcess:
    sets = [f"--set={key}={value}" for key, value in OVERRIDES.items()]
    words = [sys.executable, "-m", "flows.cli.main", "run", "--root", str(guarded.root), *sets]
    env = own_environment(guarded.place)
    return subprocess.run(words, cwd=guarded.place, env=env, capture_output=True, text=True, timeout=RUN, check=False)


def test_athanor_run_with_the_passwords_of_the_environment(guarded, triggered):
    before = len(guarded.prefect("/flow_runs/filter", {}))
    done = athanor_run(guarded)
    assert done.returncode == 0, done.stderr
    assert "0 of 15 stages made, 15 reused" in done.stdout and finished_runs(guarded) >= 1
    assert len(guarded.prefect("/flow_runs/filter", {})) > before, "it is not in the service's Prefect"
    assert_nowhere(guarded.place, done.stdout, done.stderr)


def test_nothing_holds_a_password(guarded, triggered):
    """Check the files of servers and worker while they run, databases with their journals, and the output of `ps`."""
    assert_nowhere(guarded.place, guarded.seen.copy())
    assert {"mlflow.db", "prefect.db", "service.json", "mlflow.log", "prefect.log", "worker.log"} <= {
        path.name for path in guarded.root.rglob("*")
    }


def test_no_password_is_made_where_the_environment_has_them(guarded):
    assert not (guarded.root / "service" / "password").exists()
    said = (guarded.place / "root-up.txt").read_text()
    assert "Prefect's page takes $PREFECT_SERVER_API_AUTH_STRING, MLflow's $MLFLOW_TRACKING_USERNAME with" in said
