"""A whole flow whose images are encoded once: the training is the same, the features are reused, and the encoder is
exported unchanged."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flows.cli.main import main
from tests.e2e.command import made, only, sets
from tests.e2e.test_families import DIGITS, run, this_process  # noqa: F401
from trainer.contract.result import read_metrics

pytestmark = pytest.mark.promise(
    "Training on features that were stored once equals computing them in eleven layouts, losses to 1e-5 and "
    "weights to 2e-6; damaged or foreign features are refused."
)

FROZEN = {"train.vision.frozen": "true", "train.merger.frozen": "true", "compare": "null"}


def plan(root: Path, capsys, **changes: object) -> str:
    capsys.readouterr()
    assert main(["plan", "--root", str(root), *sets({**DIGITS, **FROZEN, **changes})]) == 0
    return capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype", "first", "later"),
    # Rounded features change the first loss little. Updates at this learning rate then drive the two trainings apart.
    [("qwen3_vl", "float32", 1e-6, 1e-4), ("qwen3_5", "bfloat16", 1e-3, 0.1)],
)
def test_a_flow_encodes_each_image_once(family, dtype, first, later, tmp_path, capsys):
    settings = {**DIGITS, **FROZEN, "model.family": family}
    cached = {"model.family": family, "encode_images.dtype": dtype}
    assert run(tmp_path, {**settings, **cached}) == 0
    encoded, trained, exported = (only(tmp_path, name) for name in ("encode_images", "train", "export"))
    stats = encoded.manifest.stats
    assert 0 < stats["distinct_images"] < stats["images"]  # several questions about one image
    assert (stats["largest_error"] == 0) is (dtype == "float32")
    rows = read_metrics(trained.dir)
    assert rows[-1].vision_tflops == 0 and rows[-1].heldout_loss < rows[5].heldout_loss

    model = only(tmp_path, "embedded_model")
    before, after = (load_file(path / "hf" / "model.safetensors") for path in (model.dir, exported.dir))
    is_vision = {name: "visual." in name for name in before}
    assert any(is_vision.values()) and before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) or not is_vision[name], name
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())

    again = plan(tmp_path, capsys, **cached)
    assert re.search(r"\b0 of 13 stages would be made, 13 reused", again)
    assert re.search(rf"image features +[\d,]+ bytes per image token in {dtype} .* distinct images", again)
    other_rate = plan(tmp_path, capsys, **cached, **{"train.optim.lr": 1e-3, "plan_bins.max_patches": 4096})
    assert re.search(r"encode_images +reuse", other_rate) and re.search(r"train +make", other_rate)
    assert re.search(r"encode_images +make", plan(tmp_path, capsys, **cached, **{"train.precision": "bfloat16"}))

    assert run(tmp_path, settings) == 0
    (computed,) = (artifact for artifact in made(tmp_path, "train") if "features" not in artifact.manifest.parents)
    expected = read_metrics(computed.dir)
    assert rows[0].loss == pytest.approx(expected[0].loss, rel=first)
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected], rel=later)
    assert rows[-1].heldout_loss == pytest.approx(expected[-1].heldout_loss, rel=later)
    assert expected[-1].vision_tflops > 0
