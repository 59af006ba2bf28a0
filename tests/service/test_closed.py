"""A service as `athanor up` starts it, called by attackers: other users, pages of other origins in a browser, and
somebody who has the password but may not run commands."""

import base64
import http.server
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.serializers import PickleSerializer

from tests.helpers.browser import chromium, logged_in, requires_chromium
from tests.helpers.patience import at_most
from tests.helpers.service import RunningService, request, running_service, wait_for
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A page of another origin, another user of the machine, and somebody with the password run no command."
    ),
]
END_SECONDS = 120
EVIL = "http://evil.example"


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """Run a new service, which the tests of this module may damage."""
    with running_service(tmp_path_factory.mktemp("closed") / "root") as running:
        yield running


@pytest.fixture
def mark(tmp_path) -> Path:
    """Return the path of a file that exists only if an attacker's command was run."""
    return tmp_path / "mark"


def num_runs(service: RunningService) -> int:
    return service.prefect("/flow_runs/count", {})


def ended_run(service: RunningService, deployment: str = "prepare-data") -> dict:
    """Ask for a run of a deployment, and return it when it has ended."""
    return service.end_of(service.start_run(deployment, SMALL), END_SECONDS)


# Other users of the machine


def test_the_password_is_in_a_file_of_its_user_alone_and_in_no_log(service):
    path = service.root / "service" / "password"
    assert path.stat().st_mode & 0o777 == 0o600
    (line,) = [line for line in service.printed() if line.startswith("log in: ")]
    assert f"the line in {path}" in line and "the user athanor" in line
    word = service.login.partition(":")[2]
    logs = [other.read_text(errors="replace") for other in (service.root / "service").glob("*.log*")]
    assert len(logs) >= 3 and not [text for text in [*logs, service.output.read_text()] if word in text]


def test_neither_server_answers_anybody_without_it(service):
    for path in ("/", "/version", "/get-artifact?run_uuid=1&path=x", "/graphql", "/static-files/x.js"):
        assert request(service.record.mlflow + path)[0] == 401, path
    for path in ("/admin/version", "/flow_runs/1", "/work_pools/athanor", "/variables/name/x"):
        assert request(service.record.prefect_api + path)[0] == 401, path


# Pages of other origins


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": EVIL}, {"Origin": "http://127.0.0.1:9"}])
def test_another_host_or_page_is_refused_even_with_the_password(service, headers):
    expected = 400 if "Host" in headers else 403
    for url in (f"{service.record.prefect_api}/health", service.record.prefect_ui, f"{service.record.mlflow}/health"):
        assert request(url, **headers)[0] == expected
    for url in (f"{service.record.prefect_api}/flow_runs/filter", f"{service.record.mlflow}/graphql"):
        assert request(url, {}, login=service.login, **headers)[0] == expected


def test_a_preflight_allows_its_own_page_alone(service):
    for page, is_own in ((service.record.prefect_ui, True), (EVIL, False)):
        asks = {"Origin": page, "Access-Control-Request-Method": "POST"}
        url = f"{service.record.prefect_api}/deployments/filter"
        request = urllib.request.Request(url, headers=asks, method="OPTIONS")
        try:
            with urllib.request.urlopen(request, timeout=at_most(30)) as answer:
                assert is_own and answer.headers["Access-Control-Allow-Origin"] == page
        except urllib.error.HTTPError as error:
            assert not is_own and error.headers["Access-Control-Allow-Origin"] is None


FETCH = """async ([url, options]) => {
    try { const answer = await fetch(url, options); return [answer.type, answer.status]; }
    catch (error) { return ["failed", 0]; }
}"""


@pytest.fixture(scope="module")
def foreign() -> Iterator[int]:
    """Return the port of another user's server on this machine."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<title>a page</title>")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@requires_chromium
def test_a_page_of_another_origin_in_a_browser_that_knows_the_password_does_nothing(service, foreign):
    api, mlflow = service.record.prefect_api, service.record.mlflow
    runs_url, search = f"{api}/flow_runs/count", f"{mlflow}/ajax-api/2.0/mlflow/experiments/search"
    create = f"{api}/deployments/{service.deployment('evaluate')['id']}/create_flow_run"
    make = f"{mlflow}/api/2.0/mlflow/experiments/create"
    before = num_runs(service)
    basic = f"Basic {base64.b64encode(service.login.encode()).decode()}"
    known = {"Authorization": basic, "Content-Type": "application/json"}
    with chromium("--host-resolver-rules=MAP *.example 127.0.0.1") as browser:
        page = logged_in(browser, service).new_page()
        page.goto(service.record.prefect_ui)  # the server's own page may call
        ask = {"method": "POST", "headers": known, "body": "{}"}
        assert page.evaluate(FETCH, [runs_url, ask]) == ["basic", 200]
        page.goto(mlflow)
        ask = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": '{"max_results": 5}'}
        assert page.evaluate(FETCH, [search, ask]) == ["basic", 200], "the browser logs in by itself"
        for origin in (f"http://evil.example:{foreign}", f"http://127.0.0.1:{foreign}"):
            page.goto(origin)
            for url, body in ((create, "{}"), (make, '{"name": "evil"}')):
                told = {"method": "POST", "headers": known, "body": body}
                assert page.evaluate(FETCH, [url, told]) == ["failed", 0]
                simple = {"method": "POST", "mode": "no-cors", "credentials": "include", "body": body}
                assert page.evaluate(FETCH, [url, simple])[0] in ("opaque", "failed")  # sent, but the answer is hidden
            for url in (runs_url, search, f"{mlflow}/version", f"{api}/health"):
                assert page.evaluate(FETCH, [url, {"credentials": "include"}]) == ["failed", 0]
        for url in (service.record.prefect_ui, mlflow):  # a foreign name that was pointed at this machine
            port = url.rpartition(":")[2]
            page.goto(f"http://rebound.example:{port}/health")
            assert page.locator("body").inner_text() == "Invalid host header"
    assert num_runs(service) == before
    experiments = service.ask(search, {"max_results": 100})["experiments"]
    assert "evil" not in {experiment["name"] for experiment in experiments}


# Somebody with the password


def test_a_deployment_of_somebody_is_not_run(service, mark):
    ours = service.deployment("evaluate")
    steps = [{"prefect.deployments.steps.run_shell_script": {"script": f"touch {mark}"}}]
    theirs = {"name": "theirs", "flow_id": ours["flow_id"], "entrypoint": ours["entrypoint"], "pull_steps": steps}
    service.prefect("/deployments/", {**theirs, "work_pool_name": "athanor"})
    run = ended_run(service, "theirs")
    assert run["state_type"] == "CRASHED" and "deployment theirs is not athanor's" in run["state"]["message"]
    assert not mark.exists()


def test_a_changed_deployment_or_pool_is_not_run_until_the_worker_starts_again(service, mark):
    template = {"job_configuration": {"command": f"touch {mark}"}, "variables": {"type": "object", "properties": {}}}
    service.prefect("/work_pools/athanor", {"base_job_template": template}, "PATCH")
    run = ended_run(service)
    assert "work pool athanor: its job template is not as registered" in run["state"]["message"]
    path = f"/deployments/{service.deployment('evaluate')['id']}"
    service.prefect(path, {"entrypoint": "subprocess.Popen"}, "PATCH")
    run = ended_run(service, "evaluate")
    assert "deployment evaluate: entrypoint='subprocess.Popen' is not as registered" in run["state"]["message"]
    assert not mark.exists()
    service.program("worker").kill()
    wait_for(lambda: "started again" in service.printed()[-1], END_SECONDS, "new worker", service.tell)
    assert ended_run(service)["state_type"] == "COMPLETED", service.tell()


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_state_that_names_a_pickle_runs_nothing(service, mark, tmp_path):
    """The engine of a run whose state was set to Completed would read the result that the state names."""
    stored = {"storage_key": str(tmp_path / "record"), "serializer": {"type": "pickle"}, "prefect_version": "3.8.8"}
    result = PickleSerializer().dumps(Touch(mark)).decode()
    (tmp_path / "record").write_text(json.dumps({"metadata": stored, "result": result}))
    run_id = service.start_run("prepare-data", SMALL)
    done = {"state": {"type": "COMPLETED", "data": stored}, "force": True}

    path = f"/flow_runs/{run_id}"
    wait_for(lambda: service.prefect(path)["state_type"] == "PENDING", END_SECONDS, "start", service.tell)
    service.prefect(f"{path}/set_state", done)
    wait_for(lambda: "names a stored result" in service.log("worker"), END_SECONDS, "refusal", service.tell)
    time.sleep(1)
    assert not mark.exists()


def test_mlflow_writes_and_reads_nothing_beside_its_files(service, tmp_path):
    url = f"{service.record.mlflow}/api/2.0/mlflow"
    made = service.ask(f"{url}/experiments/create", {"name": "theirs", "artifact_location": tmp_path.as_uri()})
    run = service.ask(f"{url}/runs/create", made)["run"]["info"]
    assert run["artifact_uri"].startswith(tmp_path.as_uri())
    (tmp_path / "own_keys").write_text("canary")
    for page in (
        f"{url}/artifacts/list?run_id={run['run_id']}",
        f"{service.record.mlflow}/get-artifact?run_uuid={run['run_id']}&path=own_keys",
    ):
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            service.ask(page)
        assert re.search(r"files at .* are not served", refused.value.read().decode())
    prompt = {"prompt_template": "{x}", "prompt_parameters": [{"key": "x", "value": "1"}], "model_route": "m"}
    prompt |= {"model_input": "1", "mlflow_version": "3", **made}
    run = service.ask(f"{service.record.mlflow}/ajax-api/2.0/mlflow/runs/create-promptlab-run", prompt)["run"]
    assert run["info"]["status"] == "FAILED" and [path.name for path in tmp_path.iterdir()] == ["own_keys"]


@pytest.mark.parametrize(
    "path", ["assistant/config", "gateway/secrets/list", "gateway-proxy", "jobs/1", "scorers/list", "upload-artifact"]
)
def test_mlflow_starts_no_commands_and_calls_nobody(service, path):
    for prefix in ("api/3.0", "ajax-api/3.0", "ajax-api/2.0"):
        assert request(f"{service.record.mlflow}/{prefix}/mlflow/{path}", login=service.login)[0] == 404
