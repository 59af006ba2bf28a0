"""A backup that is made while a run trains is a root: served, it shows the earlier runs and makes new ones."""

import json

import pytest

from flows.cli.backup import WENT_ON
from tests.helpers.service import RunningService, run_athanor, running_service, wait_for
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise("A backup made while runs go on is a root that can be served, and whose runs register."),
]
RUN_SECONDS = 400


def states(service: RunningService) -> dict[str, str]:
    return {run["id"]: run["state_type"] for run in service.prefect("/flow_runs/filter", {})}


def test_a_backup_of_a_service_that_trains_is_served_and_trains(tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    with running_service(root) as service:
        service.end_of(done := service.start_run("vlm-sft", SMALL), RUN_SECONDS)
        goes_on = service.start_run("vlm-sft", {**SMALL, "train.num_steps": 3000})
        wait_for(lambda: any(root.glob("scratch/train-*/metrics.jsonl")), RUN_SECONDS, "training", service.tell)
        saved = run_athanor("backup", root, str(copy))
        assert saved.returncode == 0, saved.stderr
        assert states(service)[goes_on] == "RUNNING", "the backup disturbs nothing"
        service.prefect(f"/flow_runs/{goes_on}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        service.end_of(goes_on, RUN_SECONDS)
    (root / "mlflow.db").unlink()  # the copy needs nothing of it
    with running_service(copy) as restored:
        assert states(restored)[done] == "COMPLETED"
        (before,) = [run["info"] for run in restored.mlflow_runs() if run["info"]["status"] == "FINISHED"]
        assert before["artifact_uri"].startswith("mlflow-artifacts:")
        assert restored.prefect(f"/flow_runs/{goes_on}")["state"]["message"] == WENT_ON
        assert not {"RUNNING", "PENDING"} & {*states(restored).values()}
        new = restored.end_of(restored.start_run("vlm-sft", {**SMALL, "train.seed": 7}), RUN_SECONDS)
        assert new["state_type"] == "COMPLETED", new["state"]["message"]
        wait_for(
            lambda: (
                sorted(run["info"]["status"] for run in restored.mlflow_runs()) == ["FINISHED", "FINISHED", "KILLED"]
            ),
            *(60, "end of the run that went on in MLflow", restored.tell),
        )
        versions = restored.ask(f"{restored.record.mlflow}/api/2.0/mlflow/model-versions/search")["model_versions"]
        assert sorted(int(version["version"]) for version in versions) == [1, 2], json.dumps(versions)
