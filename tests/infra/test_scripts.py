"""The scripts and YAML files of infra/: shellcheck, yamllint, and a real first start of Postgres."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.compose_file import INFRA
from tests.helpers.postgres import BINARIES, PostgresServer, postgres_server

pytestmark = pytest.mark.promise(
    "compose.yaml and Dockerfiles pass their checks; MLflow starts as compose.yaml says, and `athanor sync` "
    "sends a run there whole."
)

BIN = Path(sys.executable).parent
YAML = sorted(map(str, INFRA.rglob("*.yaml")))
SCRIPTS = sorted(str(path) for pattern in ("*.sh", "*.sbatch") for path in INFRA.rglob(pattern))


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "files", "mistake", "words"),
    [
        (("shellcheck",), SCRIPTS, "rm -rf $undefined/*\n", "SC2115"),
        (("yamllint", "--strict", "-c", f"{INFRA}/.yamllint"), YAML, "key: 1\nkey: 2\n", "duplication of key"),
    ],
    ids=["shellcheck", "yamllint"],
)
def test_a_linter_passes_all_files_and_sees_a_mistake(command, files, mistake, words, tmp_path):
    done = _run(f"{BIN}/{command[0]}", *command[1:], *files)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / f"wrong{Path(files[0]).suffix}"
    wrong.write_text(f"{Path(files[0]).read_text()}\n{mistake}")
    assert words in _run(f"{BIN}/{command[0]}", *command[1:], str(wrong)).stdout


def test_ascii_only():
    texts = [path for path in INFRA.rglob("*") if path.is_file() and path.suffix not in (".png", ".pyc")]
    assert len(texts) > 10
    assert [str(path) for path in texts if not path.read_text(encoding="utf-8").isascii()] == []


@pytest.mark.skipif(not (BINARIES / "psql").exists(), reason="needs PostgreSQL's server (apt-get install postgresql)")
def test_each_service_has_a_database_that_no_other_enters():
    with postgres_server() as server:
        check_databases(server, {"PREFECT_DB_PASSWORD": "it's $fine; \\", "MLFLOW_DB_PASSWORD": "other"})


def check_databases(server: PostgresServer, passwords: dict[str, str]) -> None:
    server.make_databases(passwords)
    of_user = {"prefect": passwords["PREFECT_DB_PASSWORD"], "mlflow": passwords["MLFLOW_DB_PASSWORD"]}
    of_user["postgres"] = server.password

    def ask(user: str, database: str, sql: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PGPASSWORD": of_user[user]}
        place = ("-h", "127.0.0.1", "-p", str(server.port), "-U", user, "-d", database)
        return subprocess.run([BINARIES / "psql", "-At", *place, "-c", sql], env=env, capture_output=True, text=True)

    for user, database in (("prefect", "prefect"), ("mlflow", "mlflow"), ("mlflow", "mlflow_auth")):
        assert ask(user, database, "CREATE TABLE t (x int)").returncode == 0
    assert ask("prefect", "prefect", "CREATE EXTENSION pg_trgm").returncode == 0  # Prefect's own schema makes it
    for user, database in (("prefect", "mlflow"), ("mlflow", "prefect"), ("prefect", "mlflow_auth")):
        assert "permission denied for database" in ask(user, database, "SELECT 1").stderr
    roles = "SELECT rolname FROM pg_roles WHERE rolsuper OR rolcreatedb OR rolcreaterole"
    assert ask("postgres", "postgres", roles).stdout.split() == ["postgres"]
    same = "SELECT count(*) FROM pg_authid WHERE rolname IN ('prefect', 'mlflow') AND rolpassword LIKE 'SCRAM-SHA-256%'"
    assert ask("postgres", "postgres", same).stdout.strip() == "2"
