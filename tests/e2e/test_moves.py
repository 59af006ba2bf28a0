"""Drawn clips from their drawing to a model that says what moves, where to and when."""

import pytest

from dataset_builders.contracts.sample import SPLITS
from tests.e2e.command import athanor, made, only, sets
from tests.helpers.index import read_index

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise("A tiny model learns on a CPU what moves in drawn clips, and where to, from clips to scores."),
]

# Fewer clips and steps than the recipe's: enough to tell directions apart.
SMALL = {"data.num_what": 300, "data.num_where": 1500, "data.num_when": 200, "train.num_steps": 900}
SMALL |= {"contamination": "null", "execution.registry.gates": "{}"}
CHANCE = 0.25  # of four directions


def test_a_model_learns_where_shapes_move(tmp_path):
    said = athanor("run", "moves", "--root", str(tmp_path), *sets(SMALL), seconds=1500)
    assert "Warning" not in said
    tokenized = only(tmp_path, "tokenize")
    index, stats = read_index(tokenized.dir), tokenized.manifest.stats
    assert set(index["num_images"].to_pylist()) == {4}, "eight frames are four groups"
    assert stats["num_videos"] == 2000 == sum(stats["splits"][split]["num_samples"] for split in SPLITS)
    assert only(tmp_path, "verify").manifest.stats["faults"] == []
    assert f"`{stats['video_prompt']}`" in (only(tmp_path, "release").dir / "hf" / "README.md").read_text()
    (tuned,) = [found for found in made(tmp_path, "evaluate") if "made_by" in found.manifest.parents]
    scores = tuned.manifest.stats["scores"]
    assert scores["moves_where"]["exact_match"] > 2 * CHANCE
    assert scores["moves_when"]["score"] == scores["moves_when"]["temporal_iou"] > 0.2
    assert only(tmp_path, "compare").manifest.stats["subsets"]["moves_where"]["difference"]["low"] > 0
