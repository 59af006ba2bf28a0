"""The verify stage: what it lets pass and what it catches, with real loaders on tiny models."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dataset_builders.storage.files import write_json
from stages.answer.config import AnswerConfig
from stages.answer.heldout import GeneratedAnswer
from stages.export.stage import copy_processor_files
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.verify import file_entries
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.prompt import BOX_FORMAT, read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.inputs.served import completed
from stages.verify import loaders
from stages.verify import stage as verify_stage
from stages.verify.config import VerifyConfig
from stages.verify.stage import STAGE, write_questions
from tests.helpers.adapter_files import merge_adapter, write_adapter
from tests.helpers.adapters import PLACES, adapted_model
from tests.helpers.boxes import asked_sample
from tests.helpers.evaluation import answered, mixed_samples, samples_artifact, talkative_hf_dir
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir, talkative_hybrid_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from tests.stages.artifacts import stage_artifact
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.loop.export import write_weights

pytestmark = pytest.mark.promise(
    "An export gives the same answers in transformers, PEFT and MLflow without athanor; a wrong scale, another "
    "base or other pixels are caught."
)

CONFIG = VerifyConfig(num_questions=6, max_new_tokens=6)
MODELS = {
    "qwen3": text_hf_dir,
    "qwen3_vl": talkative_hf_dir,
    "qwen3_vl untied": lambda: tiny_hf_dir("second"),
    "qwen3_5": talkative_hybrid_dir,
    "qwen3_vl_moe": lambda: experts_hf_dir("listed"),
    "qwen3_5_moe": lambda: experts_hf_dir("shared"),
}


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the loaders without the seconds of a new process."""

    def run(launcher, job):
        monkeypatch.setattr(sys, "argv", ["loaders.py", job.arguments[-1]])
        loaders.main()

    monkeypatch.setattr(verify_stage, "run_job", run)


def exported(directory: Path, hf_dir: Path, adapter_dir: Path | None = None) -> Artifact:
    shutil.copytree(hf_dir, directory / "hf")
    file = directory / "hf" / "config.json"
    file.write_text(json.dumps(completed(json.loads(file.read_text()))))  # as the stage `export` does, for vLLM
    stats = {}
    if adapter_dir is not None:
        shutil.copytree(adapter_dir, directory / "adapter")
        stats["adapter"] = {"kind": "lora"}
    return stage_artifact(directory, "export", files=file_entries(directory, ("hf/*", "adapter/*")), stats=stats)


def verified(tmp_path: Path, export: Artifact, base: Path, answers_of: Path | None = None, tokens: int = 6) -> dict:
    """Return the stats of the stage; `base` is the model before training, `answers_of` the one that gave our answers if
    it is not the export, `tokens` the limit of our answers."""
    reads_pictures = (export.dir / "hf" / "preprocessor_config.json").is_file()
    heldout = [sample for sample in mixed_samples(8) if reads_pictures or not sample.images]
    samples = samples_artifact(tmp_path / "samples", heldout)
    asked = {"hf": External(answers_of or export.dir / "hf", "hf_dir", "f" * 16), "samples": samples}
    answers = answered(AnswerConfig(max_new_tokens=tokens), asked, tmp_path / "root")
    inputs = {"export": export, "answers": answers, "samples": samples, "model": External(base, "hf_dir", "b" * 16)}
    made = run_stage(STAGE, CONFIG, inputs, tmp_path / "root").artifact
    assert sorted(path.name for path in made.dir.iterdir()) == [
        *("loaders.json", "manifest.json", "report.html", "report.json")
    ]
    return made.manifest.stats


@pytest.mark.full
@pytest.mark.parametrize("family", MODELS)
def test_an_export_of_each_family_passes(family, tmp_path, in_this_process):
    hf_dir = MODELS[family]()
    stats = verified(tmp_path, exported(tmp_path / "export", hf_dir), hf_dir)
    assert stats["same_answers"] == 1.0 and not stats["faults"] and not stats["reason"], stats
    assert set(stats["loaders"]) == {"transformers", "mlflow"}


def test_answers_that_our_own_limit_cut_are_compared_up_to_the_cut(tmp_path, in_this_process):
    stats = verified(tmp_path, exported(tmp_path / "export", talkative_hf_dir()), talkative_hf_dir(), tokens=2)
    assert stats["same_answers"] == 1.0, stats


@pytest.mark.parametrize("kind", [full("lora"), "dora"])
def test_a_merged_export_and_its_adapter_pass(kind, tmp_path, in_this_process):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base, kind=kind)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    stats = verified(tmp_path, exported(tmp_path / "export", merged, adapter), base)
    same = {name: each["same_answers"] for name, each in stats["loaders"].items()}
    assert same == {"transformers": 1.0, "peft": 1.0, "mlflow": 1.0}


@pytest.mark.full
@pytest.mark.parametrize("shape", ["first", "hybrid-first", "experts-listed", "experts-shared"])
def test_what_the_trainer_exports_passes(shape, tmp_path, in_this_process):
    """Merged weights and the adapter, also of experts, as the trainer writes them."""
    targets = ROLES if "experts" in shape else PLACES[shape]
    with single_rank() as mesh:
        adapter = AdapterConfig(rank=8, alpha=12, targets=targets)
        run, model = adapted_model(tmp_path, mesh, shape, adapter)
        write_weights([model], mesh, run.model_copy(update={"output_dir": tmp_path / "made"}))
    copy_processor_files(run.hf_dir, tmp_path / "made" / "hf", {})
    shutil.copy(run.hf_dir / "generation_config.json", tmp_path / "made" / "adapter")
    export = exported(tmp_path / "export", tmp_path / "made" / "hf", tmp_path / "made" / "adapter")
    stats = verified(tmp_path, export, run.hf_dir)
    assert stats["same_answers"] == 1.0 and set(stats["loaders"]) == {"transformers", "peft", "mlflow"}, stats


def test_an_adapter_merged_with_a_wrong_scale_is_caught(tmp_path, in_this_process):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base)
    strong = write_adapter(tmp_path / "strong", base, use_rslora=True)
    merged = merge_adapter(tmp_path / "merged", base, strong)
    stats = verified(tmp_path, exported(tmp_path / "export", merged, adapter), base)
    assert stats["loaders"]["transformers"]["same_answers"] == 1.0  # it answers as our own stage, both wrongly
    assert stats["same_answers"] == stats["loaders"]["peft"]["same_answers"] < 1
    assert stats["reason"].startswith("peft answers ") and "by a margin of" in stats["reason"]


def test_other_programs_are_asked_with_boxes_in_the_form_of_the_export(tmp_path):
    hf_dir = Path(shutil.copytree(talkative_hf_dir(), tmp_path / "hf"))
    write_json(hf_dir / BOX_FORMAT, BoxFormat(convention="resized_pixels").model_dump())
    model, samples = ModelDirectory(hf_dir), samples_artifact(tmp_path / "samples", [asked_sample()])
    said = [GeneratedAnswer(key="asked/00000000", turn=0, answer="a", stopped=True, ids=[5])]
    chat = ChatEncoder(model)
    (question,) = write_questions(tmp_path, CONFIG, samples, said, chat, read_prompt_format(model))
    assert question["question"] == "<image>What is at [144, 0, 288, 2]?"
    assert "What is at [144, 0, 288, 2]?" in chat.decode(np.array(question["prompt_ids"]))


@pytest.mark.full
def test_an_adapter_of_another_base_is_caught(tmp_path, in_this_process):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    other = shutil.copytree(base, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    noisy = {name: t + 0.3 * t.std() * torch.randn(t.shape, generator=draw) for name, t in tensors.items()}
    save_file(noisy, other / "model.safetensors", metadata={"format": "pt"})
    stats = verified(tmp_path, exported(tmp_path / "export", merged, adapter), other)
    assert stats["same_answers"] == stats["loaders"]["peft"]["same_answers"] < 1


def test_pixels_of_another_normalisation_are_caught(tmp_path, in_this_process):
    """transformers prefers processor_config.json to the file that was answered with."""
    base = shutil.copytree(talkative_hf_dir(), tmp_path / "base")
    settings = json.loads((base / "preprocessor_config.json").read_text())
    (base / "processor_config.json").write_text(json.dumps({"image_processor": {**settings, "image_mean": [0, 0, 0]}}))
    stats = verified(tmp_path, exported(tmp_path / "export", base), base, answers_of=talkative_hf_dir())
    assert stats["same_answers"] == 0 and "image_processor differs from preprocessor_config.json" in stats["reason"]


@pytest.mark.full
def test_weights_other_than_those_that_answered_are_caught(tmp_path, in_this_process):
    base = talkative_hf_dir()
    changed = shutil.copytree(base, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))
    save_file({**tensors, name: 1.5 * tensors[name]}, changed / "model.safetensors", metadata={"format": "pt"})
    stats = verified(tmp_path, exported(tmp_path / "export", changed), base, answers_of=base)
    assert all(each["same_answers"] < 1 for each in stats["loaders"].values())


def test_a_directory_without_template_gets_no_answers(tmp_path, in_this_process):
    base = talkative_hf_dir()
    bare = shutil.copytree(base, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    stats = verified(tmp_path, exported(tmp_path / "export", bare), base, answers_of=base)
    assert stats["same_answers"] == 0 and stats["reason"] == "chat_template.jinja is missing"
    assert "has no chat template" in stats["faults"][1]


@pytest.mark.full
def test_the_loaders_run_in_a_process_that_has_no_athanor(tmp_path):
    hf_dir = hybrid_hf_dir()
    stats = verified(tmp_path, exported(tmp_path / "export", hf_dir), hf_dir)
    assert stats["same_answers"] == 1.0
