"""`athanor run cauldron`, the recipe for a real model, on drawn rows in the_cauldron's schema and a tiny model
directory. The trainer is a stand-in."""

import json
import logging

import pytest

from flows.cli.main import main
from flows.cli.run import registration
from flows.pipeline.recipe import load_recipe
from flows.tracking.record import MlflowState
from tests.helpers.drawn.suite import SUBSETS
from tests.helpers.drawn.write import write_suite
from tests.helpers.tiny_model import tiny_hf_dir


@pytest.fixture(autouse=True)
def own_log_handlers():
    before = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = before


@pytest.fixture
def rows(tmp_path):
    """Make a directory of <subset>/*.parquet with more subsets than the recipe asks for."""
    return write_suite(tmp_path / "drawn", dict.fromkeys(SUBSETS, 12))


@pytest.mark.full
def test_a_directory_of_rows_and_one_of_a_model_go_in_place_of_the_hub_s(rows, tmp_path, capsys):
    sets = {
        "data": rows,
        "model": tiny_hf_dir(),
        "convert.heldout_fraction": 0.5,
        "train.num_steps": 12,
        "evaluate.max_new_tokens": 2,
        "execution.num_workers": 1,
    }
    root = tmp_path / "root"
    assert main(["run", "cauldron", "--root", str(root), *(f"--set={k}={v}" for k, v in sets.items())]) == 0
    said = capsys.readouterr().out
    (converted,) = (root / "artifacts" / "convert").glob("*/manifest.json")
    assert set(json.loads(converted.read_text())["stats"]["samples"]) == {"ai2d", "chartqa"}
    # The stand-in trainer returns the weights that it was given, so there is no gain.
    again = next(line for line in said.splitlines() if " run cauldron " in line)
    assert f"run cauldron --set=data={rows} --set=model={tiny_hf_dir()} " in again and again.endswith(
        "--set train.optim.lr=5e-06"
    )
    assert "Not registered as athanor-cauldron: the gain in score, +0.0000 to +0.0000, does not lie above 0" in said


def test_what_is_said_of_the_registration():
    assert registration("m", [], True, MlflowState()) == ["Registered as m in MLflow."]
    answers = MlflowState(verdict="no champion before: champion")
    expected = "Registered as m in MLflow: no champion before: champion."
    assert registration("m", [], True, answers) == [expected]
    assert registration("m", ["a", "b"], True, MlflowState()) == ["Not registered as m: a", "Not registered as m: b"]
    (line,) = registration("m", [], False, MlflowState())
    assert line.startswith("Not registered as m: the run's record could not be written")
    assert registration("m", [], True, answers, is_sent=False)[0].startswith("Not registered as m yet: MLflow")


def test_it_is_what_a_real_model_is_trained_with():
    config = load_recipe("cauldron").config
    assert config.train.precision == "bfloat16" and config.train.optim.lr <= 1e-4
    assert config.tokenize.max_pixels // 256 <= config.plan_bins.max_patches == 4 * config.plan_bins.seq_len
