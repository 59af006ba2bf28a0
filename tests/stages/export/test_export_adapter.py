"""Adapters in the stages: the adapter that a training starts from, its base, and the adapter in an export."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.errors import InputError
from dataset_builders.storage.files import sha256_file
from stages.export import stage as export
from stages.export.config import ExportConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.adapter_directory import AdapterDirectory, adapter_input
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from stages.train import stage as train
from stages.train.stage import digest_of_base
from tests.helpers.fake_trainer import stand_in
from tests.helpers.tiny_model import tiny_hf_dir
from trainer.contract.adapter import AdapterConfig
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from trainer.contract.run import OptimConfig, RunConfig, TrainConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

ADAPTER = AdapterConfig(kind="dora", rank=4, alpha=8, targets=("attention", "mlp"))
CONFIG = TrainConfig(
    seed=0,
    num_steps=4,
    global_batch_size=4,
    precision="float32",
    heldout_interval=2,
    optim=OptimConfig(lr=1e-3, min_lr_fraction=0.1, warmup_steps=1, weight_decay=0.0),
    adapter=ADAPTER,
)


@pytest.fixture(autouse=True)
def fake_trainer(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.delenv("FAKE_TRAINER", raising=False)


@pytest.fixture
def inputs(tmp_path) -> dict:
    def artifact(stage: str, config: dict, stats: dict) -> Artifact:
        directory = tmp_path / "in" / stage
        directory.mkdir(parents=True)
        named = {"stage": stage, "version": 1, "fingerprint": f"{stage:0<16.16}", "parents": {}}
        Manifest(**named, config=config, stats=stats).write(directory)
        return Artifact.load(directory)

    model = shutil.copytree(tiny_hf_dir(), tmp_path / "model")
    return {
        "model": model_input(ModelDirectory(model)),
        "tokenized": artifact("tokenize", {}, {"min_pixels": 2048, "max_pixels": 9216}),
        "bins": artifact("plan_bins", {"seq_len": 512, "pad_multiple": 4}, {"num_bins": {"train": 4, "heldout": 1}}),
    }


@pytest.fixture
def start(tmp_path) -> Path:
    directory = tmp_path / "start"
    directory.mkdir()
    (directory / ADAPTER_CONFIG).write_text(json.dumps(peft_config(ADAPTER, ["lm_head"], [])))
    write_tensors(directory, 1.0)
    return directory


def write_tensors(directory: Path, number: float) -> None:
    """Write an adapter of the output projection whose values all equal one number."""
    shapes = {"lora_A.weight": (4, 4), "lora_B.weight": (4, 4), "lora_magnitude_vector": (4,)}
    tensors = {f"base_model.model.lm_head.{name}": np.full(shape, number, "f4") for name, shape in shapes.items()}
    save_file(tensors, directory / ADAPTER_WEIGHTS)


def trained(inputs, root: Path) -> Artifact:
    return run_stage(train.STAGE, CONFIG, inputs, root, StageResources()).artifact


def run_of(artifact: Artifact) -> RunConfig:
    return RunConfig.model_validate_json((artifact.dir / "run.json").read_text())


def exported(inputs, root: Path) -> Artifact:
    from_train = {"train": trained(inputs, root), "model": inputs["model"], "tokenized": inputs["tokenized"]}
    return run_stage(export.STAGE, ExportConfig(), from_train, root, StageResources()).artifact


def test_an_export_holds_the_adapter_beside_the_model(inputs, tmp_path):
    made = exported(inputs, tmp_path)
    names = {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    assert {file.name for file in (made.dir / "adapter").iterdir()} == names
    digests = {entry.name: entry.sha256 for entry in made.manifest.files}
    assert all(digests[f"adapter/{name}"] == sha256_file(made.dir / "adapter" / name) for name in names)
    assert made.manifest.stats["adapter"] == {
        **ADAPTER.model_dump(mode="json"),
        "modules": 1,
        "modules_to_save": [],
        "parameters": 4 * 32 + 16 * 4,
    }
    page = (made.dir / "report.html").read_text()
    assert "Adapter, merged into the weights" in page and "attention, mlp" in page


def test_a_training_of_the_model_itself_has_none(inputs, tmp_path):
    whole = CONFIG.model_copy(update={"adapter": None})
    made = run_stage(train.STAGE, whole, inputs, tmp_path, StageResources()).artifact
    from_train = {"train": made, "model": inputs["model"], "tokenized": inputs["tokenized"]}
    made = run_stage(export.STAGE, ExportConfig(), from_train, tmp_path, StageResources()).artifact
    assert not (made.dir / "adapter").exists() and "adapter" not in made.manifest.stats


def test_the_base_has_another_digest_by_one_bit_of_its_weights_or_one_key_of_its_config(inputs, tmp_path):
    model = inputs["model"].dir
    before = run_of(trained(inputs, tmp_path)).base_digest
    assert before == f"hf_dir@{inputs['model'].digest}" == digest_of_base(inputs["model"])
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    bit = digest_of_base(model_input(ModelDirectory(model)))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert len({before, bit, digest_of_base(model_input(ModelDirectory(model)))}) == 3


def test_an_export_says_which_base_it_has(inputs, tmp_path, monkeypatch):
    """The trainer can then refuse a checkpoint whose base differs from the training's base."""
    seen, run_trainer = [], export.run_trainer
    monkeypatch.setattr(export, "run_trainer", lambda run, *others: seen.append(run) or run_trainer(run, *others))
    exported(inputs, tmp_path)
    assert [run.base_digest for run in seen] == [digest_of_base(inputs["model"])]


def test_an_adapter_to_go_on_from_is_known_by_its_content(inputs, start, tmp_path):
    made = trained({**inputs, "adapter": adapter_input(AdapterDirectory(start))}, tmp_path)
    assert run_of(made).adapter_dir == start and run_of(trained(inputs, tmp_path)).adapter_dir is None
    elsewhere = shutil.copytree(start, tmp_path / "elsewhere")
    again = run_stage(
        train.STAGE,
        CONFIG,
        {**inputs, "adapter": adapter_input(AdapterDirectory(elsewhere))},
        tmp_path,
        StageResources(),
    )
    assert again.reused and again.artifact.dir == made.dir
    write_tensors(elsewhere, 2.0)
    assert trained({**inputs, "adapter": adapter_input(AdapterDirectory(elsewhere))}, tmp_path).dir != made.dir


def test_another_adapter_is_refused_before_anything_is_started(inputs, start, tmp_path):
    (start / ADAPTER_CONFIG).write_text(
        json.dumps(peft_config(ADAPTER.model_copy(update={"rank": 8}), ["lm_head"], []))
    )
    with pytest.raises(InputError, match=r"r is 8, and train\.adapter says 4"):
        trained({**inputs, "adapter": adapter_input(AdapterDirectory(start))}, tmp_path)
    assert not list(tmp_path.glob("scratch/*/run.json"))
