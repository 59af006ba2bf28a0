"""A new stage needs only a folder and one step: a run treats `word_count`, which is in this folder, like all stages."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from prefect.client.orchestration import get_client

from flows.cli.main import main
from flows.pipeline import plan
from flows.pipeline.steps import PREPARE_DATA, Needs, Step, make_steps
from flows.tracking.store import connect
from tests.flows.pipeline.word_count.stage import STAGE, WordCountConfig
from tests.helpers.service import wait_for
from tests.helpers.small_run import athanor, runs_of, stand_in_trainer


@pytest.fixture(autouse=True, scope="module")
def in_the_plan():
    def with_count(config, given):
        steps = make_steps(config, given)
        at = next(i for i, step in enumerate(steps) if step.flow != PREPARE_DATA)
        (samples,) = (step for step in steps if step.name == "convert")
        count = Step(PREPARE_DATA, "word_count", STAGE, WordCountConfig(), {"samples": samples}, Needs.WORKERS)
        return [*steps[:at], count, *steps[at:]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "make_steps", with_count)
        yield


class Ran(NamedTuple):
    """A finished run: its root, what it printed, and the artifact of the new stage."""

    root: Path
    printed: str
    artifact: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Ran:
    root = tmp_path_factory.mktemp("root")
    with stand_in_trainer(), contextlib.redirect_stdout(io.StringIO()) as out:
        assert athanor("run", root) == 0
    (artifact,) = (root / "artifacts" / "word_count").iterdir()
    return Ran(root, out.getvalue(), artifact)


def test_it_is_planned(tmp_path, capsys):
    assert athanor("plan", tmp_path) == 0
    text = capsys.readouterr().out
    assert re.search(r"word_count +make +its input convert will be made first", text)
    assert "16 of 16 stages would be made" in text


@pytest.mark.full
def test_it_runs_and_is_in_the_closing_table(ran):
    assert "16 of 16 stages made" in ran.printed and re.search(r"word_count +made +\d", ran.printed)
    assert re.search(r"word_count: [\d,]+ of [\d,]+", ran.printed)  # its progress
    assert json.loads((ran.artifact / "words.json").read_text())["digits_single"] > 10


@pytest.mark.full
def test_it_is_reused_and_planned_as_such_and_prefect_shows_it(ran, capsys):
    assert athanor("run", ran.root) == 0
    text = capsys.readouterr().out
    assert "0 of 16 stages made, 16 reused" in text and re.search(r"word_count +reused", text)
    assert athanor("plan", ran.root) == 0
    assert f"{ran.artifact.name} is finished" in capsys.readouterr().out
    with get_client(sync_client=True) as client:
        # task runs are reported to the server by events, which another thread sends
        wait_for(lambda: "word_count" in {run.name for run in client.read_task_runs()}, 60, "task run")
        artifacts = sorted(client.read_artifacts(), key=lambda artifact: artifact.created)
    newest = {artifact.key: str(artifact.data) for artifact in artifacts}
    assert "| word_count | reused | " in newest["stages"] and str(ran.artifact) in newest["stages"]
    assert f"`{ran.artifact}/report.html`" in newest["reports"] and "words counted" in newest["reports"]


@pytest.mark.full
def test_mlflow_has_its_fingerprint_manifest_report_and_page(ran):
    client, (run,) = connect(ran.root), runs_of(ran.root)
    assert run.data.tags["mlflow.athanor.fingerprint.word_count"] == ran.artifact.name
    logged = {Path(file.path).name for file in client.list_artifacts(run.info.run_id, "stages/word_count")}
    assert {"manifest.json", "report.json", "report.html"} <= logged
    assert "word_count" in run.data.tags["mlflow.note.content"]


@pytest.mark.full
def test_preview_writes_its_page(ran, tmp_path):
    page = tmp_path / "page.html"
    assert main(["preview", "word_count", "--root", str(ran.root), "--out", str(page)]) == 0
    assert "words counted" in page.read_text()
