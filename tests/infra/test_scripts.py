"""The scripts and YAML files of infra/: shellcheck, yamllint, and a real first start of Postgres."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.helpers.compose_file import INFRA
from tests.helpers.patience import at_most

pytestmark = pytest.mark.promise(
    "compose.yaml and Dockerfiles pass their checks; MLflow starts as compose.yaml says, and `athanor sync` "
    "sends a run there whole."
)

BIN = Path(sys.executable).parent
YAML = sorted(map(str, INFRA.rglob("*.yaml")))
SCRIPTS = sorted(str(path) for pattern in ("*.sh", "*.sbatch") for path in INFRA.rglob(pattern))
POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def test_shellcheck(tmp_path):
    command = (str(BIN / "shellcheck"), *SCRIPTS)
    done = _run(*command)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.sh"
    wrong.write_text(Path(SCRIPTS[0]).read_text() + "\nrm -rf $undefined/*\n")
    assert "SC2115" in _run(*command, str(wrong)).stdout


def test_yamllint(tmp_path):
    command = (str(BIN / "yamllint"), "--strict", "-c", str(INFRA / ".yamllint"), *YAML)
    done = _run(*command)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(YAML[0]).read_text() + "key: 1\nkey: 2\n")
    assert "duplication of key" in _run(*command, str(wrong)).stdout


def test_ascii_only():
    texts = [path for path in INFRA.rglob("*") if path.is_file() and path.suffix not in (".png", ".pyc")]
    assert len(texts) > 10
    assert [str(path) for path in texts if not path.read_text(encoding="utf-8").isascii()] == []


@pytest.fixture
def postgres():
    """Start an empty Postgres on this machine and return the address of its socket."""
    # Not below pytest's own directory, because each pytest that starts closes that to the user postgres.
    data = Path(tempfile.mkdtemp(prefix="athanor-postgres-"))
    user = {"user": "postgres"} if os.geteuid() == 0 else {}
    if user:
        shutil.chown(data, "postgres")
    subprocess.run(
        [POSTGRES / "initdb", "-D", data, "-U", "postgres", "--no-sync"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd="/",
        **user,
    )
    process = subprocess.Popen(
        [POSTGRES / "postgres", "-D", data, "-k", data, "-c", "listen_addresses=", "-c", "fsync=off"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        **user,
    )
    deadline = time.monotonic() + at_most(30)
    while _run(str(POSTGRES / "pg_isready"), "-h", str(data)).returncode and time.monotonic() < deadline:
        time.sleep(0.1)
    yield data
    process.terminate()
    process.wait(at_most(30))
    shutil.rmtree(data, ignore_errors=True)


@pytest.mark.skipif(POSTGRES is None, reason="needs PostgreSQL's server (apt-get install postgresql)")
def test_each_service_has_a_database_that_no_other_enters(postgres):
    passwords = {"PREFECT_DB_PASSWORD": "it's $fine; \\", "MLFLOW_DB_PASSWORD": "other"}
    env = {**os.environ, **passwords, "PGHOST": str(postgres), "PATH": f"{POSTGRES}:{os.environ['PATH']}"}
    subprocess.run(["bash", INFRA / "postgres" / "databases.sh"], check=True, env=env)

    def ask(user: str, database: str, sql: str) -> subprocess.CompletedProcess:
        command = ["psql", "-At", "-U", user, "-d", database, "-c", sql]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    for user, database in (("prefect", "prefect"), ("mlflow", "mlflow"), ("mlflow", "mlflow_auth")):
        assert ask(user, database, "CREATE TABLE t (x int)").returncode == 0
    assert ask("prefect", "prefect", "CREATE EXTENSION pg_trgm").returncode == 0  # Prefect's own schema makes it
    for user, database in (("prefect", "mlflow"), ("mlflow", "prefect"), ("prefect", "mlflow_auth")):
        assert "permission denied for database" in ask(user, database, "SELECT 1").stderr
    roles = "SELECT rolname FROM pg_roles WHERE rolsuper OR rolcreatedb OR rolcreaterole"
    assert ask("postgres", "postgres", roles).stdout.split() == ["postgres"]
    same = "SELECT count(*) FROM pg_authid WHERE rolname IN ('prefect', 'mlflow') AND rolpassword LIKE 'SCRAM-SHA-256%'"
    assert ask("postgres", "postgres", same).stdout.strip() == "2"
