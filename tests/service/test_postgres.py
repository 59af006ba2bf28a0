"""Must-show 4: eight processes write to MLflow's store at the same time, to a new SQLite file or a new Postgres."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.patience import at_most
from tests.helpers.postgres import PostgresServer, postgres_server, requires_postgres
from tests.helpers.service import clean_environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A schedule fires, two flow runs at once are each as alone, and eight processes write to MLflow's store, "
        "on SQLite and Postgres."
    ),
]
REPOSITORY = Path(__file__).parents[2]
WRITERS, POINTS = 8, 20


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgresql", marks=requires_postgres())])
def test_eight_writers_at_once_on_a_fresh_store_lose_nothing(store, request, tmp_path):
    environment = clean_environment()
    if store == "postgresql":
        server = request.getfixturevalue("postgres")
        server.create_database("eight_writers")
        address = f"{server.url.removeprefix('postgresql://')}eight_writers"
        environment |= {"MLFLOW_TRACKING_URI": f"postgresql+psycopg2://{address}", "PGPASSWORD": server.password}
    command = [sys.executable, "-m", "tests.helpers.writers", str(tmp_path), str(WRITERS), str(POINTS)]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=at_most(280)
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["statuses"] == [0] * WRITERS, done.stderr
    assert told["experiments"] == ["Default", "writers"]
    expected = {f"writer-{n}": [float(n * POINTS + step) for step in range(POINTS)] for n in range(WRITERS)}
    assert told["held"] == expected
