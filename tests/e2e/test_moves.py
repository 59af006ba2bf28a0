"""Drawn clips from their drawing to a model that says where their shapes move."""

import math

import pytest

from tests.e2e.command import athanor, made, only, sets
from tests.helpers.index import read_index

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise("A tiny model learns on a CPU where shapes move in drawn clips, from clips to scores."),
]

# Fewer steps than the recipe's, enough to tell along which axis a shape moves.
SMALL = {"train.num_steps": 2000, "contamination": "null", "execution.registry.gates": "{}"}


def test_a_model_learns_where_shapes_move(tmp_path):
    said = athanor("run", "moves", "--root", str(tmp_path), *sets(SMALL), seconds=1500)
    assert "Warning" not in said
    tokenized = only(tmp_path, "tokenize")
    index, stats = read_index(tokenized.dir), tokenized.manifest.stats
    assert set(index["num_images"].to_pylist()) == {2}, "four frames are two groups"
    assert stats["num_videos"] == len(index) == 3000
    assert only(tmp_path, "verify").manifest.stats["faults"] == []
    assert f"`{stats['video_prompt']}`" in (only(tmp_path, "release").dir / "hf" / "README.md").read_text()
    (tuned,) = [found for found in made(tmp_path, "evaluate") if "made_by" in found.manifest.parents]
    scores = tuned.manifest.stats["scores"]["moves_where"]
    # Who knows the four words alone, of a token and the end of the turn each, loses the logarithm of 4 an answer.
    assert scores["reference_loss"] < 0.85 * math.log(4) / 2 and scores["exact_match"] > 0.25
