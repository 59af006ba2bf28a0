"""`athanor sweep`: every combination of a grid is a run, is checked before the first run starts,
and gets a table row."""

import json
import re
from urllib.parse import unquote

import pytest
from prefect.client.orchestration import get_client

from flows.cli.main import main
from flows.pipeline.recipe import MAX_RUNS, expand, parse_grid
from flows.service import sweep as module
from flows.service.deployments import sweep_request
from flows.service.sweep import check_grid
from tests.helpers.service import lines
from tests.helpers.small_run import SMALL, error_line, runs_of

GRID = ["train.optim.lr=[1e-3,3e-3]", "train.seed=[0,1]"]
TWO = ["train.optim.lr=[1e-3,3e-3]", "train.seed=[0]"]  # results of the sweeps of this file, which run once


SETTINGS = {key: value for key, value in SMALL.items() if key != "train.optim.lr"}


def sweep(root, grid) -> int:
    sets = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    return main(["sweep", "--root", str(root), *(f"--grid={text}" for text in grid), *sets])


def table_of(text: str) -> list[list[str]]:
    """Return the rows of the closing table, split at two spaces."""
    lines = text.split("\nSweep\n")[1].split("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]


def compared(text: str) -> list[str]:
    """Return the ids of the runs on the MLflow page whose address is in the text."""
    (page,) = re.findall(r"compare-runs\?runs=(\S+)&experiments", text)
    return json.loads(unquote(page))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


def test_a_grid_is_expanded_in_order():
    grid = parse_grid(GRID)
    points = expand(grid)
    assert [tuple(point) for point in points] == [("train.optim.lr", "train.seed")] * 4
    assert [point["train.seed"] for point in points] == [0, 1, 0, 1]
    variants = check_grid("embedded", ["train.num_steps=50"], GRID)
    assert [variant.name for variant in variants][:2] == ["lr=0.001 seed=0", "lr=0.001 seed=1"]
    assert list(variants[0].recipe.differs)[:2] == ["train.optim.lr", "train.seed"]
    assert variants[0].recipe.differs["train.num_steps"] == 50


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ([], "the grid is empty; give a field and its values"),
        (["train.optim.lr"], "is not of the form a.b=[v1,v2]"),
        (["train.optim.lr=1e-3"], "is not of the form a.b=[v1,v2]"),
        (["train.optim.lr=[1"], "is not YAML: expected ',' or ']'"),
        (["train.seed=[]"], "train.seed=[] is not a list of values to try"),
        (["train.seed=[0]", "train.seed=[1]"], "train.seed appears twice"),
        (["train.seed=[0,1]", "train.optim.lr=[1e-3,3]"], "train.optim.lr=3 should be less than or equal to 1"),
        (["train.seed=[1,1]"], "grid: seed=1 and seed=1 are the same run"),
        (["execution.num_workers=[1,2]"], "are the same run; give each value once, and vary fields that change"),
        ([f"train.seed={list(range(MAX_RUNS + 1))}"], f"has {MAX_RUNS + 1} combinations, more than {MAX_RUNS}"),
    ],
)
def test_a_wrong_grid_is_one_line_and_nothing_runs(tmp_path, capsys, grid, words):
    assert sweep(tmp_path, grid) == 2
    assert words in error_line(capsys)
    assert not (tmp_path / "artifacts").exists() and not (tmp_path / "mlflow.db").exists()


@pytest.mark.full  # covered in the core tier by the sweep with a failing run
def test_data_stages_are_made_once_and_every_run_has_its_own_mlflow_run(root, capsys):
    assert sweep(root, TWO) == 0
    text = capsys.readouterr().out
    head, *rows = table_of(text)
    assert head[:3] == ["train.optim.lr", "train.seed", "state"] and head[-2:] == ["stages made", "seconds"]
    assert [row[:2] for row in rows] == [["0.001", "0"], ["0.003", "0"]]
    assert [row[head.index("stages made")] for row in rows] == ["15 of 15", "8 of 15"]
    assert {row[2] for row in rows} == {"finished"} and rows[0][head.index("held-out loss")] == "2.0000"
    runs = runs_of(root)
    names = {run.info.run_name.split(" num_scans")[0] for run in runs}
    assert names == {f"embedded lr={lr} seed=0" for lr in (0.001, 0.003)}
    assert sorted(compared(text)) == sorted(run.info.run_id for run in runs)
    (name,) = {run.data.tags["athanor.sweep"] for run in runs}
    assert re.fullmatch("embedded by train.optim.lr, train.seed [0-9a-f]{8}", name)
    assert sweep(root, TWO) == 0
    head, *rows = table_of(capsys.readouterr().out)
    assert [row[head.index("stages made")] for row in rows] == ["0 of 15"] * 2 and len(runs_of(root)) == len(runs)


def test_the_best_run_is_the_first_of_the_table_and_its_score_the_first_number():
    variants = check_grid("embedded", [], ["train.seed=[0,1,2,3]"])
    scores = [{"empty_rate": 0.0, "exact_match": score} for score in (0.5, 0.75, None)]
    outcomes = [module.Outcome(one, {"scores": {"overall": found}}) for one, found in zip(variants, scores)]
    columns, rows = module.tabulate([module.Outcome(variants[3], error="no"), *outcomes])
    assert columns[:4] == ["train.seed", "state", "exact_match", "empty_rate"]
    assert [row[0] for row in rows] == ["1", "0", "2", "3"] and rows[-1][1] == "failed"


def test_a_run_that_fails_does_not_stop_the_others(small_run, tmp_path, capsys, monkeypatch):
    """The first of two runs fails in its export with a full disk, which is not an error of athanor's own. The second
    one finds every stage finished."""
    real, started = module.vlm_sft, []

    def first_fails(plan):
        started.append(plan.config.train.optim.lr)
        if plan.config.train.optim.lr == 0.003:
            raise RuntimeError("disk full while export wrote; make room and run again\nmore")
        return real(plan)

    monkeypatch.setattr(module, "vlm_sft", first_fails)
    root = small_run.copy(tmp_path)
    assert sweep(root, ["train.optim.lr=[3e-3,2e-3]", "train.seed=[0]"]) == 1
    text = capsys.readouterr().out
    assert started == [0.003, 0.002] and "1 of 2 runs failed" in text
    head, *rows = table_of(text)
    assert [row[head.index("state")] for row in rows] == ["finished", "failed"]
    assert "\n  lr=0.003 seed=0: disk full while export wrote; make room and run again\n" in text
    assert "compare-runs" not in text  # of one run
    assert len(runs_of(root, "tags.`athanor.sweep` LIKE 'embedded by train.optim.lr, train.seed %'")) == 1


@pytest.mark.full
def test_the_deployed_flow_refuses_in_its_state_and_keeps_the_table(root, monkeypatch):
    monkeypatch.setenv("ATHANOR_ROOT", str(root))
    settings = {"convert.heldout_fraction": 0.3}
    state = sweep_request("embedded", grid={"train.optim.lr": [0.1, 7]}, settings=settings, return_state=True)
    assert state.is_failed() and state.message.startswith("recipe embedded with settings: train.optim.lr=7 should be")

    grid = {"train.optim.lr": [0.001, 0.003], "train.seed": [0]}
    state = sweep_request("embedded", grid=grid, set=lines(SETTINGS), return_state=True)
    assert state.is_completed() and state.message == "2 runs finished"
    with get_client(sync_client=True) as client:
        tables = [a for a in client.read_artifacts() if a.key == "sweep"]
        names = {run.name for run in client.read_flow_runs()}
    texts = [str(table.data) for table in tables]
    assert any("| train.seed |" in text and "[Compare them in MLflow](" in text for text in texts)
    assert any(name.endswith(" by train.optim.lr, train.seed") for name in names)
