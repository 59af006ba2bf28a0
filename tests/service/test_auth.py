"""Both servers with passwords from the environment: nobody gets in without them, a run succeeds, and no file or command
line shows them."""

import asyncio
import json
from collections.abc import Iterator

import pytest
import websockets

from tests.helpers.canary import SECRETS, assert_nowhere, athanor, environment, seen_command_lines
from tests.helpers.patience import at_most
from tests.helpers.service import RunningService, request, running_service
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


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[RunningService]:
    """Run a service that takes its passwords from the environment. `root.parent` holds all files that it and its
    clients write, `seen` the command lines meanwhile."""
    place = tmp_path_factory.mktemp("guarded")
    given = {**environment(place), "MLFLOW_TRACKING_USERNAME": MLFLOW_USER}
    with seen_command_lines() as seen, running_service(place / "root", environment=given) as service:
        service.seen = seen
        yield service


PREFECT_CALLS = (
    *(("/flow_runs/filter", {}), ("/deployments/filter", {}), ("/variables/filter", {})),
    *((path, None) for path in ("/admin/version", "/admin/settings", "/nowhere")),
)
MLFLOW_CALLS = (
    ("/api/2.0/mlflow/experiments/search", {"max_results": 5}),
    ("/ajax-api/2.0/mlflow/experiments/search", {"max_results": 5}),  # the page's own
    ("/api/2.0/mlflow/registered-models/search", None),
    ("/api/2.0/mlflow-artifacts/artifacts", None),
    ("/api/2.0/mlflow/users/get?username=admin", None),
    *((path, None) for path in ("/", "/version", "/metrics", "/get-artifact?run_uuid=1&path=x.png")),
)
# Without a login, with a wrong password, with each server's own in the other: the guard's test has more.
WRONG = [None, "admin:", PREFECT + "x", MLFLOW.upper()]


@pytest.mark.parametrize("login", WRONG, ids=range(len(WRONG)))  # passwords differ per process
def test_neither_server_answers_anybody_without_its_password(guarded, login):
    for path, body in PREFECT_CALLS:
        status, answer = request(guarded.record.prefect_api + path, body, login=login)
        assert status == 401 and b"Unauthorized" in answer, path
    for path, body in MLFLOW_CALLS:
        assert request(guarded.record.mlflow + path, body, login=login)[0] == 401, path


async def talk(url: str, first: object, subprotocols: list[str] | None) -> str:
    """Send a first message to a websocket. Return the answer, or the way in which the websocket was closed."""
    try:
        async with websockets.connect(url, subprotocols=subprotocols, open_timeout=at_most(30)) as socket:
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


def test_mlflows_pickle_switch_is_off(guarded):
    assert guarded.program("mlflow").environ()["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


def test_servers_do_not_know_each_others_passwords(guarded):
    for part, own, others in (
        ("prefect", "PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"),
        ("mlflow", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING"),
    ):
        environment = guarded.program(part).environ()
        assert own in environment and others not in environment


@pytest.fixture(scope="module")
def triggered(guarded) -> dict:
    """Start a run through the Prefect server, and return it when it has ended."""
    return guarded.end_of(guarded.start_run("vlm-sft", OVERRIDES), RUN)


def test_a_run_of_the_service_completes(guarded, triggered):
    assert triggered["state_type"] == "COMPLETED", triggered["state"]["message"]
    assert finished_runs(guarded) >= 1


def finished_runs(guarded: RunningService) -> int:
    return sum(run["info"]["status"] == "FINISHED" for run in guarded.mlflow_runs(MLFLOW))


def test_athanor_run_with_the_passwords_of_the_environment(guarded, triggered):
    before = len(guarded.prefect("/flow_runs/filter", {}))
    place = guarded.root.parent
    done = athanor(place, "run", OVERRIDES, seconds=RUN, MLFLOW_TRACKING_USERNAME=MLFLOW_USER)
    assert done.returncode == 0, done.stderr
    assert "0 of 15 stages made, 15 reused" in done.stdout and finished_runs(guarded) >= 1
    assert len(guarded.prefect("/flow_runs/filter", {})) > before, "it is not in the service's Prefect"
    assert_nowhere(place, done.stdout, done.stderr)


def test_nothing_holds_a_password(guarded, triggered):
    """Check the files of servers and worker while they run, databases with their journals, and the output of `ps`."""
    assert_nowhere(guarded.root.parent, guarded.seen.copy())
    assert {"mlflow.db", "prefect.db", "service.json", "mlflow.log", "prefect.log", "worker.log"} <= {
        path.name for path in guarded.root.rglob("*")
    }


def test_no_password_is_made_where_the_environment_has_them(guarded):
    assert not (guarded.root / "service" / "password").exists()
    said = guarded.output.read_text()
    assert "Prefect's page takes $PREFECT_SERVER_API_AUTH_STRING, MLflow's $MLFLOW_TRACKING_USERNAME with" in said
