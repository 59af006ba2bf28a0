"""The loaders of vLLM in a Python of their own, against the stand-in; tests/parity/test_vllm.py asks the real one."""

import json
import shutil
from collections import Counter

import pytest

from stages.answer.transformers_engine import Generator
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.launchers.vllm import VLLM_PYTHON
from tests.helpers.adapter_files import merge_adapter, write_adapter
from tests.helpers.evaluation import mixed_samples, talkative_hf_dir
from tests.helpers.standin import standin_python
from tests.helpers.tiers import full
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import talkative_hybrid_dir
from tests.helpers.tiny_text_model import text_hf_dir
from tests.stages.verify.test_verify import exported, in_this_process, verified

__all__ = ["in_this_process"]
pytestmark = pytest.mark.promise(
    "The check of exports asks vLLM where it is installed, or where ATHANOR_VLLM_PYTHON says: its prompts, pixels and "
    "answers, an adapter beside its base too, and what vLLM needs of a directory."
)
MODELS = {
    "qwen3_vl": talkative_hf_dir,
    "qwen3": text_hf_dir,
    "qwen3_5": talkative_hybrid_dir,
    "qwen3_vl_moe": lambda: experts_hf_dir("listed"),
    "qwen3_5_moe": lambda: experts_hf_dir("shared"),
}


@pytest.fixture(autouse=True)
def standin(tmp_path, monkeypatch):
    monkeypatch.setenv(VLLM_PYTHON, str(standin_python(tmp_path)))


def said(hf_dir):
    """Return the token that a model's answers have most, so that they end at it if it ends them."""
    generator = Generator(ModelDirectory(hf_dir))
    asked = [sample for sample in mixed_samples(8) if sample.images]
    prompts = [generator.encode_prompt(s.messages[:1], generator.encode_images(s.images)) for s in asked]
    return Counter(token for answer in generator.generate(prompts, 6) for token in answer.ids[1:]).most_common(1)[0][0]


@pytest.mark.parametrize("family", [full(name) for name in MODELS])
def test_an_export_of_each_family_passes(family, tmp_path, in_this_process):
    stats = verified(tmp_path, exported(tmp_path / "export", MODELS[family]()), MODELS[family]())
    assert stats["loaders"]["vllm"]["same_answers"] == 1.0 and stats["same_answers"] == 1.0, stats
    assert ["vllm", "not checked", "", "not installed"] not in stats["rows"]


def test_an_adapter_beside_its_base_passes_though_the_base_sees_and_ends_otherwise(tmp_path, in_this_process):
    base = shutil.copytree(talkative_hf_dir(), tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    ends = json.loads((merged / "generation_config.json").read_text())
    (merged / "generation_config.json").write_text(json.dumps(ends | {"eos_token_id": [said(merged), 380, 382]}))
    shutil.copy(merged / "generation_config.json", adapter)
    (base / "generation_config.json").write_text(json.dumps(ends | {"eos_token_id": 380}))
    settings = json.loads((base / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    (base / "preprocessor_config.json").write_text(json.dumps(settings))
    stats = verified(tmp_path, exported(tmp_path / "export", merged, adapter), base)
    shares = {name: loader["same_answers"] for name, loader in stats["loaders"].items()}
    assert shares == dict.fromkeys(("transformers", "peft", "vllm", "vllm adapter", "mlflow"), 1.0), stats


@pytest.mark.full
def test_an_adapter_merged_with_a_wrong_scale_is_caught(tmp_path, in_this_process):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base)
    strong = write_adapter(tmp_path / "strong", base, use_rslora=True)
    stats = verified(
        tmp_path, exported(tmp_path / "export", merge_adapter(tmp_path / "m", base, strong), adapter), base
    )
    vllm = stats["loaders"]["vllm adapter"]
    assert vllm["same_answers"] < 1 and "by a margin of" in vllm["first"]
    assert stats["loaders"]["vllm"]["same_answers"] == 1.0


@pytest.mark.full
def test_an_adapter_that_vllm_refuses_is_named_and_not_asked(tmp_path, in_this_process):
    base = talkative_hf_dir()
    adapter = write_adapter(tmp_path / "adapter", base, kind="dora")
    stats = verified(tmp_path, exported(tmp_path / "e", merge_adapter(tmp_path / "m", base, adapter), adapter), base)
    assert stats["loaders"]["vllm adapter"]["first"] == "vllm adapter fails: it is a DoRA, which vLLM has not"
    assert stats["same_answers"] == 1.0


@pytest.mark.full
def test_a_program_that_ends_is_a_line_and_no_failure(tmp_path, in_this_process, monkeypatch):
    broken = tmp_path / "broken" / "vllm"
    broken.mkdir(parents=True)
    (broken / "_version.py").write_text("__version__ = '0.24.0'")
    (broken / "__init__.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv(VLLM_PYTHON, str(standin_python(tmp_path / "broken", tmp_path / "broken")))
    stats = verified(tmp_path, exported(tmp_path / "export", talkative_hf_dir()), talkative_hf_dir())
    assert stats["loaders"]["vllm"]["first"] == "vllm fails: its process ended with status 3, see the log"
    assert stats["same_answers"] == 1.0
