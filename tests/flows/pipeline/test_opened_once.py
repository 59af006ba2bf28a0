"""A run opens each of its inputs once: its recipe, the model's directory, the raw files."""

from collections import Counter
from pathlib import Path

import pytest

from flows.cli.plan import size_rows
from flows.pipeline import recipe
from flows.pipeline.flow import check_chat
from flows.pipeline.plan import Plan, first_lines
from flows.pipeline.recipe import load_recipe
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs import model_directory, raw_source
from tests.helpers.raw_rows import plain_rows, write_source
from tests.helpers.tiny_model import tiny_hf_dir

DATA_STAGES = ("convert", "contamination", "tokenize", "plan_bins")


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """Kind and name of a file -> how often it was read."""
    read: Counter[str] = Counter()

    def counted(module: object, name: str, label: str) -> None:
        function = getattr(module, name)

        def call(path: Path, *args: object) -> object:
            read[" ".join([label, Path(path).name, *(str(arg) for arg in args if label == "settings of")])] += 1
            return function(path, *args)

        monkeypatch.setattr(module, name, call)

    counted(model_directory, "read_config", "config.json of")
    counted(model_directory, "stored_tensors", "headers of")
    counted(model_directory, "read_settings", "settings of")
    counted(model_directory, "digest_once", "digest of")
    counted(raw_source, "sha256_file", "raw digest of")
    counted(recipe, "_read", "recipe")
    return read


def test_a_plan_and_the_stages_of_its_process_open_each_input_once(tmp_path, counts):
    hf_dir, source = tiny_hf_dir(), write_source(tmp_path / "source", {"one": plain_rows(12)}, file_rows=6)
    sets = [f"model={hf_dir}", f"data={source}", "convert.heldout_fraction=0.3", "convert.min_heldout=1"]
    plan = Plan.open(load_recipe(overrides=sets), tmp_path / "root")
    list(first_lines(plan))
    size_rows(plan)
    check_chat(plan)
    for name in DATA_STAGES:
        step = plan.step(name)
        step.artifact = run_stage(step.stage, step.config, step.read(), plan.root).artifact
    assert max(counts.values()) == 1, counts
    assert {
        f"config.json of {hf_dir.name}",
        f"headers of {hf_dir.name}",
        "digest of model.safetensors",
    } <= counts.keys()
    assert sum(name.startswith("raw digest of") for name in counts) == 2
