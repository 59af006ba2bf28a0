"""A released model that was trained with adapters: as a whole model, and as an adapter that PEFT loads with its
base."""

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from stages.release.config import ReleaseConfig
from stages.release.stage import STAGE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.verify import check_inputs, file_entries
from tests.helpers.adapters import adapted_model, adapter_of
from tests.helpers.single_rank import single_rank
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.artifacts import stage_artifact
from tests.stages.release.test_release import EVALUATED, ORIGINS
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.loop.export import write_weights

pytestmark = pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)

BASE = "Qwen/Qwen3-VL-2B-Instruct"
FACTS = {"kind": "lora", "rank": 4, "alpha": 6.0, "targets": ["attention"], "modules": 9, "parameters": 1234}


@pytest.fixture
def inputs(tmp_path) -> dict[str, Artifact]:
    def made(stage: str, **stats: object) -> Artifact:
        files = file_entries(tmp_path / stage, ("hf/*", "adapter/*"))
        return stage_artifact(tmp_path / stage, stage, files=files, stats=stats)

    with single_rank() as mesh:
        run, model = adapted_model(tmp_path, mesh, "first", adapter_of("first"))
        write_weights([model], mesh, run.model_copy(update={"output_dir": tmp_path / "export"}))
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / "export" / "hf" / name).write_bytes((tiny_hf_dir() / name).read_bytes())
    return {
        "base": run.hf_dir,
        "export": made("export", dtype="float32", parameters={"vision": 3}, active_parameters=3, adapter=FACTS),
        "train": made("train", steps=3, loss=0.5),
        "samples": made("convert", samples={"digits": {"train": 20, "heldout": 8}}, origins=ORIGINS),
        "evaluate": made("evaluate", **EVALUATED),
    }


def released(inputs, root: Path, base: str | None = BASE) -> Artifact:
    config = ReleaseConfig(name="athanor-digits", base_model=base, datasets=["drawn"], recipe={})
    return run_stage(STAGE, config, {k: v for k, v in inputs.items() if k != "base"}, root).artifact


def test_the_adapter_lies_in_the_directory_that_is_given_away(inputs, tmp_path):
    made = released(inputs, tmp_path / "root")
    adapter, source = made.dir / "hf" / "adapter", inputs["export"].dir / "adapter"
    assert os.path.samefile(adapter / ADAPTER_WEIGHTS, source / ADAPTER_WEIGHTS)
    ours, theirs = (json.loads((path / ADAPTER_CONFIG).read_text()) for path in (adapter, source))
    assert ours == {**theirs, "base_model_name_or_path": BASE} and theirs["base_model_name_or_path"] is None
    names = {entry.name for entry in made.manifest.files}
    assert {f"hf/adapter/{ADAPTER_WEIGHTS}", f"hf/adapter/{ADAPTER_CONFIG}", "hf/model.safetensors"} <= names
    check_inputs({"hf": made})
    directory = released(inputs, tmp_path / "root", str(inputs["base"])).dir / "hf" / "adapter" / ADAPTER_CONFIG
    assert json.loads(directory.read_text())["base_model_name_or_path"] is None


def test_what_the_card_says_loads(inputs, tmp_path):
    """transformers loads the whole model of the directory, PEFT the adapter in it; both give the same model."""
    path = released(inputs, tmp_path / "root").dir / "hf"
    whole = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
    base = AutoModelForImageTextToText.from_pretrained(inputs["base"], local_files_only=True)
    merged = PeftModel.from_pretrained(base, path, subfolder="adapter").merge_and_unload().state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in whole.state_dict().items())


def test_the_card_says_what_was_trained_of_which_base(inputs, tmp_path):
    card = ModelCard.load(released(inputs, tmp_path / "root").dir / "hf" / "README.md")
    assert {"lora", "peft"} <= set(card.data.tags) and card.data.base_model == BASE
    assert "Trained is a LoRA adapter of rank 4 beside that model, 1,234 numbers." in card.text
    assert f'from_pretrained("{BASE}"' in card.text
    assert 'PeftModel.from_pretrained(base, path, subfolder="adapter")' in card.text
    assert "| targets | attention |" in card.text
