"""The needs of vLLM, of a directory and of an adapter, in one line each; tests/parity/test_vllm.py asks vLLM itself."""

import json
import shutil

import pytest

from stages.export.stage import copy_processor_files
from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.inputs.served import lora_options, missing_keys, unservable, unservable_adapter
from tests.helpers.adapter_files import write_adapter
from tests.helpers.evaluation import talkative_hf_dir
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "The check of exports asks vLLM where it is installed, or where ATHANOR_VLLM_PYTHON says: its prompts, pixels and "
    "answers, an adapter beside its base too, and what vLLM needs of a directory."
)
LACKING = {
    talkative_hf_dir: {},
    text_hf_dir: {},
    hybrid_hf_dir: {"mamba_ssm_dtype": "float32"},
    lambda: experts_hf_dir("listed"): {"norm_topk_prob": True},
    lambda: experts_hf_dir("shared"): {"mamba_ssm_dtype": "float32"},
}

# The tiny model was saved by transformers 5, in its own layout of experts, which an export keeps.
LAYOUT = [
    "model.language_model.layers.0.mlp.experts.down_proj is [8, 64, 48], as transformers 5 saves it, and vLLM reads "
    "the published [8, 48, 64]"
]


@pytest.mark.parametrize("hf_dir", LACKING)
def test_an_export_has_the_keys_that_vllm_reads_and_a_model_saved_by_transformers_lacks(hf_dir, tmp_path):
    source = ModelDirectory(hf_dir())
    lacking = LACKING[hf_dir]
    assert missing_keys(source.config) == ({"text_config": lacking} if lacking else {})
    words = [f"config.json: text_config has no {name}, which vLLM reads" for name in lacking]
    layout = LAYOUT if source.config["model_type"] == "qwen3_vl_moe" else []
    assert unservable(source) == words + layout
    (tmp_path / "hf").mkdir()
    shutil.copy(source.path / "model.safetensors", tmp_path / "hf")
    copy_processor_files(source.path, tmp_path / "hf", {})
    exported = ModelDirectory(tmp_path / "hf")
    assert unservable(exported) == layout and lacking.items() <= exported.config.get("text_config", {}).items()


def test_a_config_that_misleads_vllm_is_one_line(tmp_path):
    hf_dir = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps(config | {"architectures": None}))
    (line,) = unservable(ModelDirectory(hf_dir))
    assert "architectures is null, and vLLM finds the model by it: ['Qwen3VLForConditionalGeneration']" in line


def test_files_that_vllm_would_load_and_answers_that_would_not_end_are_one_line(tmp_path):
    hf_dir = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    shutil.copy(hf_dir / "model.safetensors", hf_dir / "old.safetensors")
    (hf_dir / "generation_config.json").write_text("{}")
    lines = unservable(ModelDirectory(hf_dir))
    assert "old.safetensors is no file of the model, and vLLM loads every *.safetensors" in lines[0]
    assert "eos_token_id is missing" in lines[1] and len(lines) == 2


def test_adapters_that_vllm_takes(tmp_path):
    adapter = AdapterDirectory(write_adapter(tmp_path / "adapter", talkative_hf_dir()))
    assert unservable_adapter(adapter.config, adapter.tensors) == ""
    assert lora_options(4, adapter.modules)["enable_tower_connector_lora"] is True
    options = lora_options(33, [name for name in adapter.modules if "visual" not in name])
    assert options["max_lora_rank"] == 64 and options["enable_tower_connector_lora"] is False


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"use_dora": True}, [], "it is a DoRA, which vLLM has not"),
        ({"r": 513}, [], "its rank is 513, and vLLM takes at most 512"),
        ({}, ["model.visual.merger.norm.weight"], "it holds model.visual.merger.norm.weight, trained whole"),
        ({}, ["lm_head"], "it adapts lm_head, which vLLM takes of few models alone"),
        ({}, ["model.layers.0.mlp.experts"], "it adapts one of the two matrices of model.layers.0.mlp.experts"),
        ({}, ["layers.0.mlp.experts.base_layer"], "it adapts one of the two matrices of layers.0.mlp.experts,"),
        ({}, ["layers.0.mlp.experts", "layers.0.mlp.experts.base_layer"], ""),
    ],
)
def test_adapters_that_vllm_does_not_take_are_one_line(config, tensors, words):
    names = [name if name.endswith(".weight") else f"{name}.lora_{which}.weight" for name in tensors for which in "AB"]
    refused = unservable_adapter({"r": 4} | config, names)
    assert refused.startswith(words) and bool(refused) == bool(words)
