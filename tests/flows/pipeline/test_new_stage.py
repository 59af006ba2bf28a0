"""A new stage needs only a folder and one step: a run treats `word_count`, which is in this folder, like all stages."""

import json
import re
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from flows.cli.main import main
from flows.pipeline import plan
from flows.pipeline.steps import PREPARE_DATA, Needs, Step, make_steps
from flows.tracking.store import connect
from tests.flows.pipeline.word_count.stage import STAGE, WordCountConfig
from tests.helpers.service import wait_for
from tests.helpers.small_run import athanor


@pytest.fixture(autouse=True)
def in_the_plan(monkeypatch):
    def with_count(config, given):
        steps = make_steps(config, given)
        at = next(i for i, step in enumerate(steps) if step.flow != PREPARE_DATA)
        (samples,) = (step for step in steps if step.name == "convert")
        count = Step(PREPARE_DATA, "word_count", STAGE, WordCountConfig(), {"samples": samples}, Needs.WORKERS)
        return [*steps[:at], count, *steps[at:]]

    monkeypatch.setattr(plan, "make_steps", with_count)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def finished(root, capsys) -> Path:
    if not (root / "mlflow.db").exists():
        assert athanor("run", root) == 0
        capsys.readouterr()
    return root


def artifact_of(root: Path) -> Path:
    (directory,) = (root / "artifacts" / "word_count").iterdir()
    return directory


def test_it_is_planned(root, capsys):
    assert athanor("plan", root) == 0
    text = capsys.readouterr().out
    assert re.search(r"word_count +make +its input convert will be made first", text)
    assert "16 of 16 stages would be made" in text


@pytest.mark.full
def test_it_runs_and_is_in_the_closing_table(root, capsys):
    assert athanor("run", root) == 0
    text = capsys.readouterr().out
    assert "16 of 16 stages made" in text and re.search(r"word_count +made +\d", text)
    assert re.search(r"word_count: [\d,]+ of [\d,]+", text)  # its progress
    assert json.loads((artifact_of(root) / "words.json").read_text())["digits_single"] > 10


@pytest.mark.full
def test_it_is_reused_and_planned_as_such(finished, capsys):
    assert athanor("run", finished) == 0
    text = capsys.readouterr().out
    assert "0 of 16 stages made, 16 reused" in text and re.search(r"word_count +reused", text)
    assert athanor("plan", finished) == 0
    assert f"{artifact_of(finished).name} is finished" in capsys.readouterr().out
    assert athanor("plan", finished, **{"convert.seed": 5}) == 0
    assert re.search(r"word_count +make +its input convert will", capsys.readouterr().out)


@pytest.mark.full
def test_prefect_has_its_task_and_shows_its_artifact_and_report(finished, capsys):
    assert athanor("run", finished) == 0
    with get_client(sync_client=True) as client:
        # task runs are reported to the server by events, which another thread sends
        wait_for(lambda: "word_count" in {run.name for run in client.read_task_runs()}, 60, "task run")
        artifacts = sorted(client.read_artifacts(), key=lambda artifact: artifact.created)
    newest = {artifact.key: str(artifact.data) for artifact in artifacts}
    assert "| word_count | reused | " in newest["stages"] and str(artifact_of(finished)) in newest["stages"]
    assert f"`{artifact_of(finished)}/report.html`" in newest["reports"] and "words counted" in newest["reports"]


@pytest.mark.full
def test_mlflow_has_its_fingerprint_manifest_report_and_page(finished):
    client = connect(finished)
    experiment = client.get_experiment_by_name("athanor-embedded")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["mlflow.athanor.fingerprint.word_count"] == artifact_of(finished).name
    logged = {Path(file.path).name for file in client.list_artifacts(run.info.run_id, "stages/word_count")}
    assert {"manifest.json", "report.json", "report.html"} <= logged
    assert "word_count" in run.data.tags["mlflow.note.content"]


@pytest.mark.full
def test_preview_writes_its_page(finished, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["preview", "word_count", "--root", str(finished), "--out", str(page)]) == 0
    assert "words counted" in page.read_text()


def test_nothing_else_names_it():
    packages = ("flows", "stages", "dataset_builders", "trainer")
    files = [path for package in packages for path in Path(__file__).parents[3].joinpath(package).rglob("*.py")]
    assert len(files) > 100 and not [path for path in files if "word_count" in path.read_text()]
