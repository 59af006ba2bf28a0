"""`athanor run cauldron` and `athanor run <path of a recipe>` on drawn rows in the_cauldron's schema. The trainer is a
stand-in."""

import json
from pathlib import Path

import pytest

from flows.cli.main import main
from tests.helpers.drawn.suite import SUBSETS
from tests.helpers.drawn.write import SUITE_YAML, write_suite
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.full  # core tier: test_run.py runs a whole recipe, and each metric has tests
SMALL = {"convert.heldout_fraction": 0.5, "evaluate.max_new_tokens": 2, "execution.num_workers": 1}


def run(recipe: object, root: Path, **changes: object) -> int:
    """Run a recipe with few steps. In the names of changes, __ is a dot."""
    sets = [f"--set={key.replace('__', '.')}={value}" for key, value in {**SMALL, **changes}.items()]
    return main(["run", str(recipe), "--root", str(root), *sets])


def converted(root: Path) -> dict:
    (manifest,) = (root / "artifacts" / "convert").glob("*/manifest.json")
    return json.loads(manifest.read_text())


def test_a_directory_of_rows_and_one_of_a_model_go_in_place_of_the_hub_s(tmp_path, capsys):
    """The directory has more subsets than the recipe asks for."""
    rows, root = write_suite(tmp_path / "drawn", dict.fromkeys(SUBSETS, 12)), tmp_path / "root"
    assert run("cauldron", root, data=rows, model=tiny_hf_dir(), train__num_steps=12) == 0
    said = capsys.readouterr().out
    assert set(converted(root)["stats"]["samples"]) == {"ai2d", "chartqa"}
    # The stand-in trainer returns the weights that it was given, so there is no gain.
    again = next(line for line in said.splitlines() if " run cauldron " in line)
    assert f" --set=data={rows} --set=model={tiny_hf_dir()} " in again and again.endswith("--set train.optim.lr=5e-06")
    assert "Not registered as athanor-cauldron: the gain in score, +0.0000 to +0.0000, does not lie above 0" in said


def test_every_set_is_scored(tmp_path, capsys):
    steps = {"train__num_steps": 5, "train__optim__warmup_steps": 1, "evaluate__max_samples_per_subset": 2}
    rows = write_suite(tmp_path / "raw", dict.fromkeys(SUBSETS, 6))
    assert run(SUITE_YAML, tmp_path, data=rows, **steps) == 0
    assert "14 of 14 stages made" in capsys.readouterr().out
    for evaluated in (tmp_path / "artifacts" / "evaluate").glob("*/manifest.json"):  # before and after training
        scores = json.loads(evaluated.read_text())["stats"]["scores"]
        assert set(SUBSETS) <= scores.keys()
        found = {name for values in scores.values() for name in values}
        assert found >= {"relaxed_accuracy", "anls", "multiple_choice", "cider", "cord_nted", "score"}
    assert converted(tmp_path)["skips"] == {}
