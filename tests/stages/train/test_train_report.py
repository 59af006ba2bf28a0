"""The report of a training shows measured values next to those that the plan had predicted."""

import base64
import json
from pathlib import Path

import pytest

from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from stages.shared.pages.report import REPORT_JSON
from stages.train.stage import make_run_config, predict, write_train_report
from tests.helpers.fake_trainer import metrics_row
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.artifacts import stage_artifact
from tests.stages.train.test_train_stage import CONFIG
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig, TrainConfig, TrainerExecution
from trainer.model.registry import read_model
from trainer.plan.placement import Placement, RankSeconds

HALF = CONFIG.model_copy(update={"precision": "bfloat16"})
SUMS = {"num_samples": 8, "num_tokens": 800, "num_loss_tokens": 80, "num_patches": 4096, "num_images": 16}
PREDICTED = Placement(
    name="first_rank",
    parallel=ParallelConfig(pp=2),
    ranks=(RankSeconds(3.0, 1.0), RankSeconds(0.0, 2.0)),
    step=5.0,
    start=1.0,
    memory={"weights": 20_000_000_000, "activations": 5_200_000_000},
)


def run_of(tmp_path: Path, config: TrainConfig, patches: int, parallel: ParallelConfig) -> RunConfig:
    epoch = {"num_bins": 4, "num_tokens": 800, "subsets": {"all": {**SUMS, "num_patches": patches}}}
    planned = {"config": {"seq_len": 512, "max_patches": 2048}, "stats": {"num_bins": {"train": 4}, "epochs": [epoch]}}
    inputs = {
        "model": model_input(ModelDirectory(tiny_hf_dir())),
        "tokenized": stage_artifact(tmp_path / "tokenize", "tokenize"),
        "bins": stage_artifact(tmp_path / "bins", "plan_bins", **planned),
    }
    resources = StageResources(trainer=TrainerExecution(parallel=parallel))
    return make_run_config(config, inputs, tmp_path / "out", resources)


def tables(directory: Path) -> dict[str, list]:
    sections = json.loads((directory / REPORT_JSON).read_text())["sections"]
    return {section["title"]: section["rows"] for section in sections if section["kind"] == "table"}


def test_the_prediction_stands_beside_what_rank_0_measured(tmp_path):
    seconds = [(2.8, 2.0, 5.1), (2.6, 2.4, 5.5), (9.0, 9.0, 9.0)]  # medians 2.8, 2.4, 5.5
    rows = [
        metrics_row(step, vision_seconds=vision, language_seconds=language, step_seconds=whole, memory_gb=20.0 + step)
        for step, (vision, language, whole) in enumerate(seconds, 1)
    ]
    write_train_report(tmp_path, rows, {}, PREDICTED)
    title = "What the plan predicted for an H200: rank 0, 20% of the step waiting"
    assert tables(tmp_path)[title] == [
        ["vision_seconds", 3.0, 2.8],
        ["language_seconds", 2.0, 2.4],
        ["step_seconds", 5.0, 5.5],
        ["memory_gb", 25.2, 23.0],
    ]
    write_train_report(tmp_path, rows, {})
    assert not [title for title in tables(tmp_path) if "predicted" in title]
    write_train_report(tmp_path, [], {}, PREDICTED)
    assert not [title for title in tables(tmp_path) if "predicted" in title]


@pytest.mark.parametrize(
    ("config", "patches", "parallel", "name"),
    [
        (HALF, 4096, ParallelConfig(), "first_rank"),
        (HALF, 4096, ParallelConfig(pp=2, vision="dealt"), "dealt"),
        (HALF, 0, ParallelConfig(), None),
        (CONFIG, 4096, ParallelConfig(), None),  # float32
    ],
)
def test_a_training_is_predicted_from_its_plan_of_bins(tmp_path, config, patches, parallel, name):
    run = run_of(tmp_path, config, patches, parallel)
    found = predict(run, parallel.pp, *read_model(run.hf_dir, run.train))
    assert (found and found.name) == name
    if found is not None:
        assert all(rank.vision > 0 for rank in found.ranks) and found.step > 0


def test_rank_0_of_a_world_with_vision_ranks_encodes_nothing(tmp_path):
    run = run_of(tmp_path, HALF, 4096, ParallelConfig(vision={"ranks": 1}))
    found = predict(run, 2, *read_model(run.hf_dir, run.train))
    assert found.name == "own_ranks" and found.ranks[0].vision == 0 < found.ranks[0].language


def test_what_layers_report_is_a_curve(tmp_path):
    rows = [metrics_row(step, layers_expert_load=1.5 + step, layers_experts_idle=0.1) for step in (1, 2)]
    write_train_report(tmp_path, rows, {})
    sections = json.loads((tmp_path / REPORT_JSON).read_text())["sections"]
    (curve,) = [section for section in sections if section["title"] == "Figures of the layers"]
    svg = base64.b64decode(curve["source"].removeprefix("data:image/svg+xml;base64,")).decode()
    assert "<svg" in svg and "layers_experts_idle" in svg
    assert curve["shows"].startswith("Figures of the layers over the steps 1 to 2: layers_expert_load from 2.5 to 3.5")
    (loss,) = [section for section in sections if section["title"] == "Loss"]
    svg = base64.b64decode(loss["source"].removeprefix("data:image/svg+xml;base64,")).decode()
    assert "<!-- step -->" in svg and "<!-- nats, mean of the loss tokens -->" in svg, "the names of the axes"
