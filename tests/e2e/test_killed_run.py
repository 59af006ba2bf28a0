"""`athanor run` without a service, killed with -9: its trainer saves, its processes end, and the next start settles its
run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.pipeline.run_record import read_runs
from tests.e2e.command import ATHANOR, sets
from tests.helpers.service import clean_environment, processes_with, wait_for
from tests.helpers.small_run import SMALL

pytestmark = pytest.mark.promise(
    "Cancel, a deadline or kill -9 leaves a checkpoint and no process, and a retry gives an undisturbed run's losses."
)

SETTINGS = {**SMALL, "train.num_steps": 2000, "execution.checkpoint.save_interval": 1000}
STATES = """
import json, sys
import flows
from pathlib import Path
from flows.service.reconcile import reconcile
settled = reconcile(Path(sys.argv[1]))
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(json.dumps([settled, [f"{run.state.name}: {run.state.message}" for run in client.read_flow_runs()]]))
"""


def trainers(root: Path) -> list[psutil.Process]:
    return [p for scratch in root.glob("scratch/train-*") for p in processes_with("ATHANOR_JOB", str(scratch))]


def servers(root: Path) -> list[psutil.Process]:
    homes = set(processes_with("PREFECT_HOME", str(root / "prefect")))
    return [p for p in processes_with("PREFECT__SERVER_EPHEMERAL", "1") if p in homes]


@pytest.fixture
def root(tmp_path) -> Iterator[Path]:
    yield tmp_path / "root"
    for process in [*trainers(tmp_path / "root"), *servers(tmp_path / "root")]:
        process.kill()


@pytest.mark.full
def test_trainer_and_server_end_by_themselves_and_the_next_start_settles_the_run(root, tmp_path):
    command = [ATHANOR, "run", "--root", str(root), *sets(SETTINGS)]
    with (tmp_path / "run.txt").open("wb") as out:
        run = subprocess.Popen(command, env=clean_environment(), stdout=out, stderr=out)
    try:
        wait_for(lambda: any(p.stat().st_size for p in root.glob("scratch/train-*/metrics.jsonl")), 240, "step")
        assert trainers(root) and servers(root)
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not trainers(root) and not servers(root), 60, "end of what the flow's process had started")
    assert list(root.glob("scratch/train-*/checkpoints/step-*")), "the trainer saved when its parent was killed"
    records = read_runs(root)  # of the flow and of its subflow
    assert any(record.tracking_run for record in records) and all(record.is_dead() for record in records)
    environment = {**clean_environment(), "PREFECT_HOME": str(root / "prefect")}
    command = [sys.executable, "-c", STATES, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    settled, states = json.loads(done.stdout.splitlines()[-1])
    assert settled == 1 and states.count("Crashed: its process died; the same command resumes from the last checkpoint")
    wait_for(lambda: not servers(root), 20, "end of the server of the second process")
