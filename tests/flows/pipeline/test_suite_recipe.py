"""`athanor run <path of a recipe>`: every drawn set gets from raw rows to a score. The trainer is a stand-in."""

import json
import logging

import pytest

from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from tests.helpers.drawn.suite import SUBSETS
from tests.helpers.drawn.write import SUITE_YAML, write_suite
from tests.helpers.plans import sources_of, steps_of

SMALL = {
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


@pytest.mark.full  # core tier: test_cauldron_recipe.py runs two of these sets, and each metric has tests
def test_every_set_is_scored(tmp_path, capsys):
    source = write_suite(tmp_path / "raw", dict.fromkeys(SUBSETS, 6))
    sets = [f"--set={key}={value}" for key, value in {**SMALL, "data": source}.items()]
    assert main(["run", str(SUITE_YAML), "--root", str(tmp_path), *sets]) == 0
    assert "14 of 14 stages made" in capsys.readouterr().out
    for evaluated in (tmp_path / "artifacts" / "evaluate").glob("*/manifest.json"):  # before and after training
        scores = json.loads(evaluated.read_text())["stats"]["scores"]
        assert set(SUBSETS) <= scores.keys()
        found = {name for values in scores.values() for name in values}
        assert found >= {"relaxed_accuracy", "anls", "multiple_choice", "cider", "cord_nted", "score"}
    (converted,) = (tmp_path / "artifacts" / "convert").glob("*/manifest.json")
    assert json.loads(converted.read_text())["skips"] == {}


def test_what_makes_the_raw_rows():
    source = steps_of(load_recipe("embedded", ["data=/somewhere"]).config)
    assert "embedded_data" not in source and sources_of(source["convert"]) == {"raw": "raw"}
    steps = steps_of(load_recipe("embedded").config)
    assert [*steps][:3] == ["embedded_data", "convert", "embedded_model"]
    assert sources_of(steps["convert"]) == {"raw": "embedded_data"}
    assert sources_of(steps["embedded_model"]) == {"samples": "convert"}
