"""The upgrade of a root without Docker, step by step as in docs/operations.md.

The older versions are simulated by their databases: MLflow's and Prefect's own migrations take a root's databases back
by some revisions. The code, the artifacts and the records of runs are those of today before and after.
"""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from alembic import command
from alembic.config import Config

from tests.helpers.service import RunningService, clean_environment, running_service
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A root whose databases are of an older MLflow and Prefect is served again after the steps of the upgrade: "
        "versions load, finished stages are reused, and runs register."
    ),
]
RUN_SECONDS = 400
ASK = """import mlflow, sys
(answer,) = mlflow.pyfunc.load_model(f"models:/athanor-embedded/{sys.argv[1]}").predict([{"question": "1 + 2?"}])
assert isinstance(answer, str)
"""


def revisions(root: Path) -> list[str]:
    """Return the revisions of the schemas of MLflow's and Prefect's databases."""
    found = []
    for name in ("mlflow.db", "prefect/prefect.db"):
        with sqlite3.connect(root / name) as database:
            found += database.execute("SELECT version_num FROM alembic_version").fetchone()
    return found


def take_back(root: Path) -> None:
    migrations = Config()
    migrations.set_main_option("script_location", str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    migrations.set_main_option("sqlalchemy.url", f"sqlite:///{root / 'mlflow.db'}")
    command.downgrade(migrations, "-8")
    prefect(root, "downgrade", "-y", "-r", "-5")


def prefect(root: Path, *words: str) -> None:
    environment = {**clean_environment(), "PREFECT_HOME": str(root / "prefect")}
    subprocess.run([sys.executable, "-m", "prefect", "server", "database", *words], env=environment, check=True)


def versions_of(service: RunningService) -> list[int]:
    found = service.ask(f"{service.record.mlflow}/api/2.0/mlflow/model-versions/search")["model_versions"]
    return sorted(int(version["version"]) for version in found)


def run_ends(service: RunningService, **changes: object) -> None:
    ended = service.end_of(service.start_run("vlm-sft", {**SMALL, **changes}), RUN_SECONDS)
    assert ended["state_type"] == "COMPLETED", ended["state"]["message"]


def test_a_root_of_older_databases_is_served_after_the_steps_of_the_document(tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    with running_service(root) as service:
        run_ends(service)
        nightly = service.deployment("vlm-sft-nightly")
        path = f"/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
        service.prefect(path, {"active": True}, "PATCH")
    now = revisions(root)
    take_back(root)
    older = revisions(root)
    assert not {*older} & {*now}
    made = {path: os.stat(path).st_mtime_ns for path in root.glob("artifacts/*/*/manifest.json")}

    athanor = [sys.executable, "-m", "flows.cli.main", "backup", str(copy), "--root", str(root)]
    subprocess.run(athanor, env=clean_environment(), check=True)
    upgrade = [sys.executable, "-m", "mlflow", "db", "upgrade", f"sqlite:///{root / 'mlflow.db'}"]
    subprocess.run(upgrade, env=clean_environment(), check=True)

    with running_service(root) as service:
        assert revisions(root) == now, "Prefect migrates its database at its start"
        assert revisions(copy) == older
        assert versions_of(service) == [1]
        subprocess.run([sys.executable, "-c", ASK, "1"], env=service.env(), check=True)
        assert service.deployment("vlm-sft-nightly")["schedules"][0]["active"]
        run_ends(service)
        assert {path: os.stat(path).st_mtime_ns for path in root.glob("artifacts/*/*/manifest.json")} == made
        run_ends(service, **{"train.seed": 7})
        assert versions_of(service) == [1, 2]
        assert not any("refused" in line for line in service.printed()), "the schedule still fits"
