"""`athanor plan` counts the tokens of videos from their containers, as many as tokenize makes, and decodes nothing."""

import pytest

from dataset_builders.videos import decode
from flows.cli.first_rows import plan_rows
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from stages.shared.artifacts.run_stage import run_stage
from tests.flows.cli.init.test_clips import messages
from tests.helpers.clips import numbered_clip
from tests.helpers.index import read_index
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise("The plan counts a video's tokens from its container, as many as tokenize makes.")


@pytest.mark.parametrize("model, rel", [("given", 0.03), ("embedded", 0.1)])  # whose tokenizer is still to be trained
def test_the_plan_counts_the_tokens_that_tokenize_makes(model, rel, tmp_path, monkeypatch):
    messages(tmp_path / "data", [numbered_clip(20 + 10 * n, first=100 * n) for n in range(12)])
    sets = [f"model={tiny_hf_dir()}"] if model == "given" else ["model.min_pixels=1024", "model.max_pixels=9216"]
    sets += [f"data={tmp_path / 'data'}", "convert.builder=openai_messages", "plan_bins.seq_len=4096"]
    sets += ["convert.options={image_root: clips}", "convert.heldout_fraction=0.3", "convert.min_heldout=1"]
    sets += ["tokenize.videos.fps=4", "tokenize.videos.max_pixels=40000", "convert.max_skip_fraction=0"]
    plan = Plan.open(load_recipe(overrides=sets), tmp_path / "root")
    read = decode._Decoders.read
    whole: list[bool] = []
    monkeypatch.setattr(decode._Decoders, "read", lambda *args: whole.append(args[3]) or read(*args))
    (reading,) = plan.config.convert_config.readings.values()
    rows = plan_rows(plan.config, reading, tmp_path / "data", plan.given.get("model"))
    assert whole and not any(whole), "frames were decoded"
    for name in ("convert", *(["embedded_model"] if model == "embedded" else []), "tokenize"):
        step = plan.step(name)
        step.artifact = run_stage(step.stage, step.config, step.read(), plan.root).artifact
    made = read_index(plan.step("tokenize").artifact.dir)["num_tokens"].to_pylist()
    assert sum(rows.tokens) == pytest.approx(sum(made), rel=rel)
    assert max(rows.tokens) == pytest.approx(max(made), rel=rel)
