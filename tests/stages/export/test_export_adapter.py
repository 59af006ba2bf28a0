"""Adapters in the stages: the adapter that a training starts from, its base, and the adapter in an export."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dataset_builders.errors import InputError
from dataset_builders.storage.files import sha256_file
from stages.export import stage as export
from stages.export.config import ExportConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.adapter_directory import AdapterDirectory, adapter_input
from stages.shared.inputs.model_directory import GENERATION_CONFIG, ModelDirectory, model_input
from stages.train import stage as train
from stages.train.stage import digest_of_base
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.train.test_train_stage import CONFIG, _run_of, fake_trainer, training_inputs  # noqa: F401
from trainer.contract.adapter import AdapterConfig
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from trainer.contract.run import TrainConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

ADAPTER = AdapterConfig(kind="dora", rank=4, alpha=8, targets=("attention", "mlp"))
ADAPTED = CONFIG.model_copy(update={"adapter": ADAPTER})


@pytest.fixture
def inputs(tmp_path) -> dict:
    return training_inputs(tmp_path, shutil.copytree(tiny_hf_dir(), tmp_path / "model"))


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


def trained(inputs, root: Path, config: TrainConfig = ADAPTED) -> Artifact:
    return run_stage(train.STAGE, config, inputs, root).artifact


def exported(inputs, root: Path, config: TrainConfig = ADAPTED) -> Artifact:
    from_train = {"train": trained(inputs, root, config), "model": inputs["model"], "tokenized": inputs["tokenized"]}
    return run_stage(export.STAGE, ExportConfig(), from_train, root).artifact


def test_an_export_holds_the_adapter_beside_the_model(inputs, tmp_path):
    made = exported(inputs, tmp_path)
    names = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, GENERATION_CONFIG}
    ends = [(made.dir / folder / GENERATION_CONFIG).read_text() for folder in ("adapter", "hf")]
    assert json.loads(ends[0])["eos_token_id"] == json.loads(ends[1])["eos_token_id"]  # the base's may end elsewhere
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
    made = exported(inputs, tmp_path, CONFIG)
    assert not (made.dir / "adapter").exists() and "adapter" not in made.manifest.stats


def test_training_and_export_say_which_base_they_have(inputs, tmp_path, monkeypatch):
    """The trainer can then refuse a checkpoint whose base differs from the training's base, if only by a key."""
    seen, run_trainer = [], export.run_trainer
    monkeypatch.setattr(export, "run_trainer", lambda run, *others: seen.append(run) or run_trainer(run, *others))
    exported(inputs, tmp_path)
    base = f"hf_dir@{inputs['model'].digest}"
    assert [run.base_digest for run in (*seen, _run_of(trained(inputs, tmp_path)))] == [base, base]
    file = inputs["model"].dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "transformers_version": "0"}))
    assert base != digest_of_base(model_input(ModelDirectory(file.parent)))


def test_an_adapter_to_go_on_from_is_known_by_its_content(inputs, start, tmp_path):
    made = trained({**inputs, "adapter": adapter_input(AdapterDirectory(start))}, tmp_path)
    assert _run_of(made).adapter_dir == start and _run_of(trained(inputs, tmp_path)).adapter_dir is None
    elsewhere = shutil.copytree(start, tmp_path / "elsewhere")
    moved = {**inputs, "adapter": adapter_input(AdapterDirectory(elsewhere))}
    again = run_stage(train.STAGE, ADAPTED, moved, tmp_path)
    assert again.reused and again.artifact.dir == made.dir
    write_tensors(elsewhere, 2.0)
    assert trained({**inputs, "adapter": adapter_input(AdapterDirectory(elsewhere))}, tmp_path).dir != made.dir


def test_another_adapter_is_refused_before_anything_is_started(inputs, start, tmp_path):
    other = peft_config(ADAPTER.model_copy(update={"rank": 8}), ["lm_head"], [])
    (start / ADAPTER_CONFIG).write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"r is 8, and train\.adapter says 4"):
        trained({**inputs, "adapter": adapter_input(AdapterDirectory(start))}, tmp_path)
    assert not list(tmp_path.glob("scratch/*/run.json"))
