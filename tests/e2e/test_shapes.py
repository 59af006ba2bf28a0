"""Drawn shapes from their drawing to a model that finds them, and the same model asked in another convention."""

import pytest

from flows.tracking.store import connect
from tests.e2e.command import athanor, made, only, sets

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A tiny model learns on a CPU to find drawn shapes; a model that answers in another convention than it is "
        "asked for is told of by its run's last lines, its scores and MLflow, with both numbers."
    ),
]

# One shape in a picture, which takes fewer steps than the recipe's two.
SMALL = {"data.num_one": 4000, "data.num_many": 300, "data.most_shapes": 1, "train.num_steps": 1000}
SMALL |= {"contamination": "null", "verify": "null", "execution.registry.gates": "{}"}
OTHER = {"tokenize.boxes.convention": "resized_pixels", "train.num_steps": 2, "train.optim.warmup_steps": 1}
OTHER |= {"train.optim.lr": 1e-9, "compare": "null"}


def test_shapes_are_found_and_another_convention_is_told_of(tmp_path):
    said = athanor("run", "shapes", "--root", str(tmp_path), *sets(SMALL), seconds=900)
    assert "Warning" not in said
    gain = only(tmp_path, "compare").manifest.stats["subsets"]["shapes_one"]
    assert gain["metric"] == "acc_iou50" and gain["base_score"] == 0 and gain["difference"]["low"] > 0.3
    (tuned,) = [found for found in made(tmp_path, "evaluate") if "made_by" in found.manifest.parents]
    scores = tuned.manifest.stats["scores"]
    assert scores["shapes_one"]["iou"] > 0.35 and scores["shapes_one"]["parse_failure_rate"] < 0.05
    assert scores["shapes_many"]["score"] == scores["shapes_many"]["box_f1"] > 0

    # The trained model writes 0 to 1000. Two steps that change nothing make it one of pixels of the resized image.
    model, earlier = only(tmp_path, "release").dir / "hf", {found.dir for found in made(tmp_path, "evaluate")}
    said = athanor("run", "shapes", "--root", str(tmp_path), *sets({**SMALL, "model": model, **OTHER}), seconds=600)
    (wrong,) = [found for found in made(tmp_path, "evaluate") if found.dir not in earlier]
    (line,) = [line for line in wrong.manifest.stats["warnings"] if line.startswith("shapes_one")]
    assert f"Warning: {line}" in said
    own, other = (found.manifest.stats["scores"]["shapes_one"]["iou"] for found in (wrong, tuned))
    assert own < 0.05 and f"read as relative_1000, mean IoU {other:.3f}, than as resized_pixels, {own:.3f}," in line
    client = connect(tmp_path)
    experiment = client.get_experiment_by_name("athanor-shapes").experiment_id
    (run,) = client.search_runs([experiment], "tags.`athanor.warning` LIKE '%relative_1000%'")
    assert line in run.data.tags["athanor.warning"] and line in run.data.tags["mlflow.note.content"]
