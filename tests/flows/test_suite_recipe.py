"""`athanor run suite`: every drawn set goes from raw rows to a score; the trainer is a stand-in."""

import json
import logging

import pytest

from dataset_builders.drawn.suite import SUBSETS
from flows.cli import main
from flows.recipe import load_recipe
from flows.stage_graph import data_stage, pipeline_nodes

SMALL = {
    **{f"data.num_{subset}": 6 for subset in SUBSETS},
    "convert.heldout_fraction": 0.5,
    "train.num_steps": 5,
    "train.optim.warmup_steps": 1,
    "evaluate.max_new_tokens": 2,
    "evaluate.max_samples_per_subset": 2,
    "execution.num_workers": 1,
}


@pytest.fixture(autouse=True)
def own_log_handlers():
    before = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = before


def test_every_set_is_scored(tmp_path, capsys):
    sets = [f"--set={key}={value}" for key, value in SMALL.items()]
    assert main(["run", "suite", "--root", str(tmp_path), *sets]) == 0
    assert "14 of 14 stages made" in capsys.readouterr().out
    (rows,) = (tmp_path / "artifacts" / "drawn_data").glob("*/manifest.json")
    assert json.loads(rows.read_text())["stats"]["rows"] == dict.fromkeys(SUBSETS, 6)
    for evaluated in (tmp_path / "artifacts" / "evaluate").glob("*/manifest.json"):  # before and after training
        scores = json.loads(evaluated.read_text())["stats"]["scores"]
        assert set(SUBSETS) <= scores.keys()
        found = {name for values in scores.values() for name in values}
        assert found >= {"relaxed_accuracy", "anls", "multiple_choice", "cider", "cord_nted", "score"}
    (converted,) = (tmp_path / "artifacts" / "convert").glob("*/manifest.json")
    assert json.loads(converted.read_text())["skips"] == {}


def test_what_makes_the_raw_rows():
    assert data_stage(load_recipe("suite").config) == "drawn_data"
    assert data_stage(load_recipe("embedded").config) == "embedded_data"
    source = load_recipe("embedded", ["data=/somewhere"]).config
    assert data_stage(source) is None and pipeline_nodes(source)[0].inputs == {"raw": "raw"}
    first, second, third, *_ = pipeline_nodes(load_recipe("suite").config)
    assert first.name == "drawn_data" and second.inputs == third.inputs == {"raw": "drawn_data"}
