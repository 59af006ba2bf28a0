"""Must-show 4: the service on Postgres, two flow runs at once, and eight writers at once on fresh databases."""

import hashlib
import json
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.cluster_config import ClusterConfig
from tests.flows.test_run import SMALL
from tests.helpers.command_lines import seen_command_lines
from tests.helpers.postgres import PostgresServer, postgres_server, requires_postgres
from tests.helpers.service import RunningService, clean_environment, nested, run_athanor, wait_for

pytestmark = [pytest.mark.slow, requires_postgres()]
REPOSITORY = Path(__file__).parents[2]
RATES = (0.001, 0.003)
WRITERS, POINTS = 8, 20
RUN_SECONDS = 400


@dataclass
class OnPostgres:
    """A service on Postgres, and the command lines that were seen while it started."""

    service: RunningService
    postgres: PostgresServer
    seen: set[bytes]

    def post(self, path: str, body: object) -> object:
        request = urllib.request.Request(
            self.service.record.prefect_api + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def on_postgres(postgres, tmp_path_factory) -> Iterator[OnPostgres]:
    root = tmp_path_factory.mktemp("postgres") / "root"
    options = ["--database", postgres.url, "--limit", f"{ClusterConfig().limit}=2"]
    with seen_command_lines() as seen:
        service = RunningService(root, options, {"PGPASSWORD": postgres.password})
        try:
            yield OnPostgres(service, postgres, seen)
        finally:
            service.stop()
    assert not service.processes(), service.tell()


def test_both_have_their_own_database_with_its_tables(on_postgres):
    names = {name for (name,) in on_postgres.postgres.query("SELECT datname FROM pg_database")}
    assert {"athanor_prefect", "athanor_mlflow"} <= names
    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    assert ("flow_run",) in on_postgres.postgres.query(tables, "athanor_prefect")
    assert ("experiments",) in on_postgres.postgres.query(tables, "athanor_mlflow")
    assert on_postgres.service.record.database == "postgresql"
    root = on_postgres.service.root
    assert not (root / "mlflow.db").exists() and not (root / "prefect" / "prefect.db").exists()


def test_two_flow_runs_at_once_are_each_as_alone(on_postgres, tmp_path_factory):
    (deployment,) = on_postgres.post("/deployments/filter", {"deployments": {"name": {"any_": ["vlm-sft"]}}})
    path = f"/deployments/{deployment['id']}/create_flow_run"
    asked = [
        {"parameters": {"recipe": "embedded", "overrides": nested({**SMALL, "train.optim.lr": rate})}} for rate in RATES
    ]
    ids = [on_postgres.post(path, body)["id"] for body in asked]
    runs = wait_for(lambda: _ended(on_postgres, ids), RUN_SECONDS, "end of the flow runs", on_postgres.service.tell)
    assert [run["state_name"] for run in runs] == ["Completed", "Completed"], on_postgres.service.tell()
    starts, ends = [run["start_time"] for run in runs], [run["end_time"] for run in runs]
    assert max(starts) < min(ends)  # ISO 8601 in UTC: they did run at once

    alone = tmp_path_factory.mktemp("alone") / "root"
    for rate in RATES:
        done = run_athanor("run", alone, train__optim__lr=rate)
        assert done.returncode == 0, done.stderr
    together, apart = _outcomes(on_postgres.service.root), _outcomes(alone)
    assert together == apart and len({digest for digest, _ in apart.values()}) == 2
    # and MLflow's Postgres has both curves whole
    counts = on_postgres.postgres.query(
        "SELECT count(*) FROM metrics WHERE key = 'loss' GROUP BY run_uuid", "athanor_mlflow"
    )
    assert sorted(counts) == [(SMALL["train.num_steps"],)] * 2


def _ended(on_postgres: OnPostgres, ids: list[str]) -> list[dict] | None:
    runs = on_postgres.post(
        "/flow_runs/filter", {"flow_runs": {"id": {"any_": ids}}, "sort": "EXPECTED_START_TIME_ASC"}
    )
    over = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
    return runs if len(runs) == len(ids) and all(run["state_type"] in over for run in runs) else None


def _outcomes(root: Path) -> dict[str, tuple[str, object]]:
    """fingerprint of each exported model -> (digest of its weights, its scores)"""
    found = {}
    for path in (root / "artifacts" / "evaluate").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        answered = root / "artifacts" / "answer" / manifest["parents"]["answers"]["fingerprint"] / "manifest.json"
        model = json.loads(answered.read_text())["parents"]["hf"]
        if model["name"] != "export":
            continue  # the model before training
        exported = model["fingerprint"]
        weights = root / "artifacts" / "export" / exported / "hf" / "model.safetensors"
        found[exported] = (hashlib.sha256(weights.read_bytes()).hexdigest(), manifest["stats"]["scores"])
    assert len(found) == len(RATES)
    return found


def test_eight_at_once_through_prefects_server_lose_nothing(on_postgres):
    def create(number: int) -> list[str]:
        return [on_postgres.post("/flows/", {"name": f"writer-{number}-{i}"})["name"] for i in range(POINTS)]

    with ThreadPoolExecutor(WRITERS) as pool:
        names = {name for made in pool.map(create, range(WRITERS)) for name in made}
    rows = on_postgres.postgres.query("SELECT name FROM flow WHERE name LIKE 'writer-%'", "athanor_prefect")
    assert {name for (name,) in rows} == names and len(rows) == WRITERS * POINTS


def test_the_password_is_in_no_file_and_no_command_line(on_postgres):
    password = on_postgres.postgres.password
    assert not [line for line in on_postgres.seen if password.encode() in line]
    for path in [on_postgres.service.output, *on_postgres.service.root.rglob("*")]:
        assert not path.is_file() or password.encode() not in path.read_bytes(), path
    # Flow runs talk to the servers, and inherit from the worker: it has no password of the database.
    parts = {p.environ()["ATHANOR_SERVICE_PART"]: p.environ() for p in on_postgres.service.processes()}
    assert password in parts["prefect"].values() and password in parts["mlflow"].values()
    assert not any(password in value for value in parts["worker"].values())


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_eight_writers_at_once_on_a_fresh_store_lose_nothing(store, request, tmp_path):
    environment = clean_environment()
    if store == "postgresql":
        server = request.getfixturevalue("postgres")
        server.create_database("eight_writers")
        address = f"{server.url.removeprefix('postgresql://')}eight_writers"
        environment |= {"MLFLOW_TRACKING_URI": f"postgresql+psycopg2://{address}", "PGPASSWORD": server.password}
    command = [sys.executable, "-m", "tests.helpers.writers", str(tmp_path), str(WRITERS), str(POINTS)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["statuses"] == [0] * WRITERS, done.stderr
    assert told["experiments"] == ["Default", "writers"]
    expected = {f"writer-{n}": [float(n * POINTS + step) for step in range(POINTS)] for n in range(WRITERS)}
    assert told["held"] == expected


def test_runs_without_a_service_start_on_a_fresh_root_at_once(tmp_path):
    """Prefect's own tables: made by one of them, and the others wait."""
    code = (
        "import sys\nimport flows\nfrom flows.service.prefect_schema import start_prefect\n"
        "from prefect.client.orchestration import get_client\nstart_prefect()\n"
        "with get_client(sync_client=True) as client: client.create_flow_from_name(sys.argv[1])\n"
    )
    places = {"PREFECT_HOME": str(tmp_path / "prefect"), "ATHANOR_CACHE_DIR": str(tmp_path / "cache")}
    environment = {**clean_environment(), **places}
    started = [
        subprocess.Popen([sys.executable, "-c", code, name], env=environment, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two", "three")
    ]
    ended = [(process.communicate(timeout=280)[1], process.returncode) for process in started]
    assert [status for _, status in ended] == [0, 0, 0], ended
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        assert sorted(database.execute("SELECT name FROM flow")) == [("one",), ("three",), ("two",)]
    (kept,) = (tmp_path / "cache" / "prefect").iterdir()  # for the next fresh root: tables, and nothing in them
    with sqlite3.connect(kept) as tables:
        assert tables.execute("SELECT count(*) FROM flow").fetchone() == (0,)
