"""The password of a service, which is made once and only for its user, and the requests that the guard lets in."""

import base64
import os

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from dataset_builders.errors import InputError
from flows.service.access import check_host, client_logins, make_access
from flows.service.guard import guarded

pytestmark = pytest.mark.promise(
    "A page of another origin, another user of the machine, and somebody with the password run no command."
)

ENVIRONMENT = {
    "PREFECT_SERVER_API_AUTH_STRING": "admin:secret",
    "MLFLOW_TRACKING_USERNAME": "someone",
    "MLFLOW_TRACKING_PASSWORD": "their own",
}


def test_a_password_is_made_once_and_is_its_users_alone(tmp_path):
    before = os.umask(0)
    try:
        first = make_access("127.0.0.1", tmp_path, {})
    finally:
        os.umask(before)
    assert first.password_path.stat().st_mode & 0o777 == 0o600
    user, _, word = first.prefect.partition(":")
    assert user == "athanor" and len(word) >= 32 and first.mlflow == first.prefect
    assert make_access("127.0.0.1", tmp_path, {}) == first
    assert word not in repr(first)
    other = tmp_path / "other"
    other.mkdir()
    assert make_access("127.0.0.1", other, {}).prefect != first.prefect


def test_the_environments_logins_go_before_it_and_are_written_nowhere(tmp_path):
    access = make_access("0.0.0.0", tmp_path, ENVIRONMENT)
    assert (access.prefect, access.mlflow) == ("admin:secret", "someone:their own")
    assert access.password_path is None and not list(tmp_path.iterdir())
    half = make_access("0.0.0.0", tmp_path, {"PREFECT_SERVER_API_AUTH_STRING": "admin:secret"})
    assert half.prefect == "admin:secret" and half.mlflow.startswith("athanor:")
    with pytest.raises(InputError, match="go together"):
        make_access("127.0.0.1", tmp_path, {"MLFLOW_TRACKING_USERNAME": "admin"})


@pytest.mark.parametrize("how", ["readable", "a link", "another user's"])
def test_a_password_that_others_may_know_is_refused(tmp_path, monkeypatch, how):
    path = tmp_path / "password"
    if how == "a link":
        (tmp_path / "elsewhere").write_text("athanor:known\n")
        (tmp_path / "elsewhere").chmod(0o600)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_text("athanor:known\n")
        path.chmod(0o640 if how == "readable" else 0o600)
    if how == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(InputError, match=r"can be read or was written by others .*; delete it"):
        make_access("127.0.0.1", tmp_path, {})


def test_a_file_that_a_kill_left_empty_is_written_again(tmp_path):
    (tmp_path / "password").touch(0o600)
    assert make_access("127.0.0.1", tmp_path, {}).prefect == (tmp_path / "password").read_text().strip()


def test_a_client_finds_what_it_lacks(tmp_path):
    assert client_logins(tmp_path, {}) == {}, "a service of before, which asks for nothing"
    made = make_access("127.0.0.1", tmp_path, {}).prefect
    word = made.partition(":")[2]
    login = {"MLFLOW_TRACKING_USERNAME": "athanor", "MLFLOW_TRACKING_PASSWORD": word}
    assert client_logins(tmp_path, {}) == {"PREFECT_API_AUTH_STRING": made, **login}
    assert client_logins(tmp_path, {"PREFECT_API_AUTH_STRING": "x:y"}) == login
    assert client_logins(tmp_path, ENVIRONMENT) == {"PREFECT_API_AUTH_STRING": "admin:secret"}


@pytest.mark.parametrize("host", ["here", "", "1.2.3", "evil.example"])
def test_a_host_is_an_address(host):
    with pytest.raises(InputError, match="is not an IP address"):
        check_host(host)


def test_names_are_this_machines(tmp_path):
    assert make_access("127.0.0.1", tmp_path, {}).names({}) == ["127.0.0.1", "[::1]", "localhost"]
    named = make_access("0.0.0.0", tmp_path, {}).names({"ATHANOR_HOST_NAMES": "one.example, Two.example"})
    assert {"one.example", "two.example", "127.0.0.1"} < set(named) and "*" not in "".join(named)
    assert make_access("::1", tmp_path, {}).url(1) == "http://[::1]:1"
    assert make_access("127.0.0.1", tmp_path, {}).url(4200) == "http://127.0.0.1:4200"


# The guard


@pytest.fixture
def client(monkeypatch) -> TestClient:
    """Return a client of a server at http://localhost:4200 behind a guard."""
    return client_of(monkeypatch, login="athanor:word")


def client_of(monkeypatch, **options: object) -> TestClient:
    async def answer(request):
        return PlainTextResponse("answered")

    async def stream(websocket):
        await websocket.accept()
        await websocket.send_text("answered")
        await websocket.close()

    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "OPTIONS"]), WebSocketRoute("/{path:path}", stream)]
    monkeypatch.setenv("ATHANOR_HOST_NAMES", "127.0.0.1,[::1],localhost")
    return TestClient(guarded(Starlette(routes=routes), **options), base_url="http://localhost:4200")


def basic(login: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


KNOWN = basic("athanor:word")


WRONG_LOGINS = [
    *({}, basic("athanor:Word"), basic("athanor"), basic(":"), basic("athanor:word2"), basic("x:word")),
    *({"Authorization": "Basic"}, {"Authorization": "Bearer word"}, {"Authorization": "Basic athanor:word"}),
]


def test_names_may_be_given_in_place_of_the_environments(monkeypatch):
    named = client_of(monkeypatch, names=["model.example"])
    assert named.get("/x", headers={"Host": "model.example"}).status_code == 200
    assert named.get("/x").status_code == 400


@pytest.mark.parametrize("path", ["/", "/api/x", "/healthy", "/health/", "/x/health", "//health"])
def test_without_the_password_nobody_gets_in(client, path):
    for headers in WRONG_LOGINS:
        answer = client.get(path, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic realm="), headers
        assert "service/password below its root" in answer.text


def test_with_it_one_does_and_health_is_everybodys(client):
    assert client.get("/api/x", headers=KNOWN).text == "answered"
    assert client.get("/health").text == "answered"
    assert client.get("/", headers=KNOWN).headers["x-frame-options"] == "SAMEORIGIN"


OWN_PAGES = ["http://localhost:4200", "http://127.0.0.1:4200", "http://[::1]:4200", "https://localhost:4200"]
FOREIGN_PAGES = [
    *("http://evil.example", "http://evil.example:4200", "http://localhost:9999", "http://127.0.0.1", "null", ""),
    *("http://localhost:4200.evil.example", "http://evil@localhost:4200", "file://", "http://[", "localhost:4200"),
    *("chrome-extension://localhost:4200", "http://xlocalhost:4200"),
]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_its_own_pages_may_call(client, method):
    for page in OWN_PAGES:
        assert client.request(method, "/api/x", headers={**KNOWN, "Origin": page}).status_code == 200, page


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_other_page_may_call_even_with_the_password(client, method):
    for page in FOREIGN_PAGES:
        answer = client.request(method, "/api/x", headers={**KNOWN, "Origin": page})
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, page
        assert client.get("/health", headers={"Origin": page}).status_code == 403, page


def test_one_foreign_page_of_two_is_enough(client):
    headers = [("Origin", "http://localhost:4200"), ("Origin", "http://evil.example"), *KNOWN.items()]
    assert client.get("/api/x", headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4200", "localhost.evil.example", "10.0.0.1", "a:b:c"])
def test_another_name_is_refused(client, host):
    assert client.get("/health", headers={**KNOWN, "Host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:4200", "127.0.0.1:9", "[::1]:4200"])
def test_its_names_are_taken_with_any_port_of_a_tunnel(client, host):
    assert client.get("/api/x", headers={**KNOWN, "Host": host}).status_code == 200
    assert client.get("/api/x", headers={**KNOWN, "Host": host, "Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {**KNOWN, "Origin": "http://evil.example"}, {**KNOWN, "Host": "evil.example"}], ids=str
)
def test_streams_are_guarded_too(client, headers):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("ws://localhost:4200/x", headers=headers):
        pass


def test_a_stream_opens(client):
    with client.websocket_connect("ws://localhost:4200/x", headers=KNOWN) as stream:
        assert stream.receive_text() == "answered"


def test_a_server_that_asks_by_itself_is_not_asked_for(monkeypatch):
    own = client_of(monkeypatch)
    assert own.get("/api/x").text == "answered"
    assert own.get("/api/x", headers={"Origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("path", "status"),
    [("/a/assistant", 404), ("/a/assistant/x", 404), ("/assistants", 200), ("/a?assistant", 200)],
)
def test_what_is_closed_does_not_answer(monkeypatch, path, status):
    closed = client_of(monkeypatch, login="athanor:word", closed=frozenset({"assistant"}))
    assert closed.get(path, headers=KNOWN).status_code == status
    assert closed.get(path).status_code == 401


def test_without_names_nobody_gets_in(monkeypatch):
    client = client_of(monkeypatch)
    monkeypatch.delenv("ATHANOR_HOST_NAMES")
    assert TestClient(guarded(client.app), base_url="http://localhost:4200").get("/health").status_code == 400


def test_a_page_may_ask_its_own_port_and_the_api_alone(client, monkeypatch):
    assert client.get("/health").headers["content-security-policy"] == "connect-src 'self' ws://*:4200"
    monkeypatch.setenv("PREFECT_UI_API_URL", "https://athanor.example/api")
    policy = client.get("/health").headers["content-security-policy"]
    assert policy == "connect-src 'self' ws://*:4200 ws://athanor.example"
