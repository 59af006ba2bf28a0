"""MLflow as compose.yaml starts it: logins, Postgres, files in an S3 store. `athanor sync` sends a complete run there.

The databases are made by infra/postgres/databases.sh, the bucket by infra/make_buckets.py, and the server has the
command and the environment of compose.yaml. Only the host names are those of this machine.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from mlflow import MlflowClient

import flows.tracking.tracker
from flows.cli.main import main
from flows.tracking.store import connect
from tests.helpers.compose_file import INFRA, load_compose, read_env_file
from tests.helpers.object_store import free_port, moto_server
from tests.helpers.patience import at_most
from tests.helpers.postgres import postgres_server, requires_postgres
from tests.helpers.service import answers, clean_environment, request, wait_for
from tests.helpers.tracked_run import Nobody, holdings, tell_a_run

pytestmark = [
    pytest.mark.full,
    requires_postgres(),
    pytest.mark.promise(
        "compose.yaml and Dockerfiles pass their checks; MLflow starts as compose.yaml says, and `athanor sync` "
        "sends a run there whole."
    ),
]
pytest.importorskip("flask_wtf", reason="needs MLflow's login: pip install -e '.[auth]'")
VALUES = {name: f"value-of-{name.lower()}" for name in read_env_file(INFRA / "env.example")}
VALUES |= {"MLFLOW_ALLOWED_HOSTS": "", "PREFECT_UI_API_URL": ""}


@dataclass(frozen=True)
class Server:
    """The addresses of MLflow and of the store behind it."""

    url: str
    store: str


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("mlflow")
    services = load_compose("compose.yaml", VALUES)["services"]
    with postgres_server() as postgres, moto_server() as store:
        postgres.make_databases(VALUES)
        make_buckets(services["buckets"]["command"][2:])
        hosts = {"postgres:5432": f"127.0.0.1:{postgres.port}", "http://s3:7070": store, "/infra/": f"{place}/"}
        (place / "mlflow_auth.ini").write_text(replaced((INFRA / "mlflow_auth.ini").read_text(), hosts))
        environment = {name: replaced(text, hosts) for name, text in services["mlflow"]["environment"].items()}
        environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}  # the only keys that moto accepts
        command, port = services["mlflow"]["command"], str(free_port())
        command = [port if word == "5000" else "127.0.0.1" if word == "0.0.0.0" else word for word in command]
        process, log = start(command, environment, place / "server.log"), place / "server.log"
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(f"{url}/health"), 180, "MLflow", log.read_text)
            yield Server(url, store)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(at_most(30))


def make_buckets(names: list[str]) -> None:
    for _ in range(2):  # a second start finds the buckets
        subprocess.run([sys.executable, str(INFRA / "make_buckets.py"), *names], check=True)


def replaced(text: str, hosts: dict[str, str]) -> str:
    for name, place in hosts.items():
        text = text.replace(name, place)
    return text


def start(command: list[str], environment: dict[str, str], log_path: Path) -> subprocess.Popen:
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**clean_environment(), **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_without_a_login_nobody_reads(server):
    assert request(f"{server.url}/api/2.0/mlflow/experiments/search?max_results=1")[0] == 401


def test_a_run_that_waited_is_sent_whole_by_sync(server, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:  # logged while no thread sends
        patch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())
        tell_a_run(tmp_path / "plain", "one")
        tell_a_run(tmp_path / "guarded", "one")
    assert main(["sync", "--root", str(tmp_path / "plain")]) == 0
    expected = holdings(connect(tmp_path / "plain"), "one")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", VALUES["MLFLOW_USER"])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", VALUES["MLFLOW_PASSWORD"])
    capsys.readouterr()
    assert main(["sync", "--root", str(tmp_path / "guarded")]) == 0, capsys.readouterr()
    assert "2 stages, 12 steps, 7 files, 1 score table, 1 model" in capsys.readouterr().out
    assert holdings(MlflowClient(server.url), "one") == expected
    kept = boto3.client("s3", endpoint_url=server.store).list_objects_v2(Bucket="mlflow")["Contents"]
    assert {Path(item["Key"]).name for item in kept} >= {"recipe.yaml", "manifest.json", "report.html"}
