"""The engine that answers with vLLM, against a stand-in that answers with transformers: what it is given, and what it
may say. tests/parity/test_vllm.py asks the real one."""

import gc
import json
import os

import numpy as np
import pytest

from dataset_builders.errors import InputError
from dataset_builders.pictures.images import read_rgb
from dataset_builders.pictures.pixels import encode_rgb, resized
from stages.answer.config import AnswerConfig
from stages.answer.engine import EngineSettings, Request, check_engine, make_engine
from stages.answer.heldout import ANSWERS_JSONL, read_answers
from stages.answer.stage import STAGE
from stages.answer.vllm_engine import _gpu
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.adapter_directory import AdapterDirectory, adapter_input
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from stages.shared.launchers.vllm import VLLM_PYTHON
from tests.helpers.adapter_files import write_adapter
from tests.helpers.evaluation import (
    answered,
    conversation,
    hf_artifact,
    mixed_samples,
    picture,
    samples_artifact,
    talkative_hf_dir,
)
from tests.helpers.standin import standin_python
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import talkative_hybrid_dir
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "vLLM forms our prompts and pixels from an export, gives the same answers but for rounding, with the adapter "
    "beside its base too, and scores the held-out set."
)
NEW_TOKENS = 9


@pytest.fixture(autouse=True)
def standin(tmp_path, monkeypatch):
    """Answer with the stand-in, and return the file that it writes its arguments to."""
    monkeypatch.setenv(VLLM_PYTHON, str(standin_python(tmp_path)))
    monkeypatch.setenv("STANDIN_OPTIONS", str(tmp_path / "options.json"))
    return tmp_path / "options.json"


def _engine(hf_dir=None, tokenized=None, **settings):
    model = ModelDirectory(hf_dir or talkative_hf_dir())
    prompt = read_prompt_format(model, tokenized)
    given = EngineSettings(model, prompt, batch_size=2, batch_tokens=999, **{"longest": 400} | settings)
    return make_engine("vllm", given)


def _asked(number, images, max_new_tokens=NEW_TOKENS):
    sample = conversation("a/00000000", [(f"{'<image>' * len(images)}Which?", "7")], images)
    return Request(number, sample.messages[:1], sample.images, max_new_tokens)


def test_the_stage_gives_the_pools_answers_with_the_trainings_pixels_and_an_adapter(standin, tmp_path):
    """The base model's own limits are others than those of the training that its answers are compared with."""
    base, root = talkative_hf_dir(), tmp_path / "root"
    adapter = AdapterDirectory(write_adapter(tmp_path / "adapter", base))
    inputs = {"hf": model_input(ModelDirectory(base)), "samples": samples_artifact(tmp_path / "s", mixed_samples(8))}
    inputs |= {"adapter": adapter_input(adapter)}
    said = []
    for engine in ("transformers", "vllm"):
        made = answered(AnswerConfig(max_new_tokens=NEW_TOKENS, engine=engine), inputs, root)
        said.append((made.dir / ANSWERS_JSONL).read_text())
    assert said[0] == said[1]
    given = json.loads(standin.read_text())
    assert given["max_lora_rank"] == 8 and given["enable_tower_connector_lora"] is True  # the adapter has rank 4
    assert given["model"] == str(base) and given["generation_config"] == "vllm" and not given["trust_remote_code"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("hf_dir", "expected"),
    [
        (text_hf_dir, {"mm_processor_kwargs": None}),
        (
            talkative_hybrid_dir,
            {"gdn_prefill_backend": "triton", "hf_overrides": {"text_config": {"mamba_ssm_dtype": "float32"}}},
        ),
        (lambda: experts_hf_dir("listed"), {"hf_overrides": {"text_config": {"norm_topk_prob": True}}}),
    ],
)
def test_each_family_gives_the_pools_answers(hf_dir, expected, standin, tmp_path):
    samples = [sample for sample in mixed_samples(8) if hf_dir is not text_hf_dir or not sample.images]
    inputs = {"hf": hf_artifact(tmp_path / "e", hf_dir()), "samples": samples_artifact(tmp_path / "s", samples)}
    configs = [AnswerConfig(max_new_tokens=NEW_TOKENS, engine=engine) for engine in ("transformers", "vllm")]
    texts = [
        [line.answer for line in read_answers(answered(c, inputs, tmp_path / "r").dir / ANSWERS_JSONL)] for c in configs
    ]
    given = json.loads(standin.read_text())
    assert {name: given.get(name) for name in expected} == expected
    if hf_dir is not talkative_hybrid_dir:  # the stand-in's is in bfloat16, as vLLM's on a CPU
        assert texts[0] == texts[1]


@pytest.mark.full
def test_limits_of_a_training_and_its_system_prompt_reach_the_model(standin):
    tokenized = {"min_pixels": 64 * 64, "max_pixels": 96 * 96, "system_prompt": "Be brief."}
    engine = _engine(tokenized=tokenized)
    given = json.loads(standin.read_text())
    size = {"shortest_edge": 64 * 64, "longest_edge": 96 * 96}
    assert given["mm_processor_kwargs"] == {"size": size, "do_resize": False} and given["max_model_len"] == 400
    group = engine.prepare([_asked(1, [picture(1, 64, 32)])])
    (question,) = group.ready
    assert [image.shape for image in question.images] == [(64, 96, 3)]
    said = dict(engine.answer([group]))
    pool = make_engine(
        "transformers", EngineSettings(ModelDirectory(talkative_hf_dir()), engine_prompt(tokenized), 2, 999)
    )
    assert said == dict(pool.answer([pool.prepare([_asked(1, [picture(1, 64, 32)])])]))


def engine_prompt(tokenized):
    return read_prompt_format(ModelDirectory(talkative_hf_dir()), tokenized)


def test_resized_images_are_those_that_are_cut_to_patches():
    pixels = read_rgb(picture(3, 72, 40))
    config = read_prompt_format(ModelDirectory(talkative_hf_dir())).pixels
    patches, grid = encode_rgb(pixels, config)
    whole = resized(pixels, config)
    assert np.array_equal(encode_rgb(whole, config)[0], patches) and whole.flags["C_CONTIGUOUS"]
    assert whole.shape == (*(grid[1:] * config.patch_format.patch_size), 3)


@pytest.mark.full
def test_answers_carry_their_number_and_a_question_that_cannot_be_asked_its_reason():
    engine = _engine()
    bad = Request(2, _asked(2, [picture(1)]).messages, (b"no image",), 9)
    groups = [engine.prepare([_asked(3, [picture(1)]), bad, _asked(8, [], 2)])]
    groups += [engine.prepare([_asked(n, [])]) for n in range(20, 29)] + [engine.prepare([bad])]
    said = dict(engine.answer(groups))
    assert sorted(said) == [3, 8, *range(20, 29)] and said[8].num_tokens <= 2
    assert groups[0].skipped[2].reason == "decode_error" and groups[-1].ready is None
    assert all(answer == said[20] for number, answer in said.items() if number > 20)
    again = dict(engine.answer([engine.prepare([_asked(4, [])])]))  # a second part of the stage
    assert again == {4: said[20]}


@pytest.mark.full
def test_its_process_ends_with_the_engine():
    engine = _engine()
    process = engine._process
    del engine
    gc.collect()
    assert process.wait(5) == 0


@pytest.mark.full
def test_a_prompt_that_vllm_refuses_and_a_process_that_ends_are_one_line():
    engine = _engine(longest=3)
    with pytest.raises(InputError, match=r"vLLM does not take a question: The decoder prompt \(length \d+\) is longer"):
        list(engine.answer([engine.prepare([_asked(1, [])])]))
    engine._process.kill()
    with pytest.raises(RuntimeError, match="vLLM's process ended") as error:
        list(engine.answer([engine.prepare([_asked(1, [])])]))
    assert "\n" not in str(error.value)


def test_a_model_that_vllm_does_not_load_is_one_line(tmp_path):
    model = ModelDirectory(talkative_hf_dir())
    settings = EngineSettings(model, read_prompt_format(model), batch_size=2, batch_tokens=9, longest=9)
    model.check_weights()
    broken = tmp_path / "broken" / "vllm"
    broken.mkdir(parents=True)
    (broken / "_version.py").write_text("__version__ = '0.24.0'")
    (broken / "__init__.py").write_text("raise RuntimeError('no kernel image is available')")
    os.environ[VLLM_PYTHON] = str(standin_python(tmp_path / "broken", tmp_path / "broken"))
    with pytest.raises(
        InputError, match=r"vLLM 0\.24\.0 does not load .*: RuntimeError: no kernel image is available;"
    ):
        make_engine("vllm", settings)


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("4,6,7", "6"), ("4", None)])
def test_a_worker_of_vllm_sees_its_own_gpu(monkeypatch, visible, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible) if visible else monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", False
    )
    if seen:
        assert _gpu(1) == {"CUDA_VISIBLE_DEVICES": seen} and _gpu(None) == {}
    else:
        with pytest.raises(
            InputError, match=r"has no GPU: CUDA_VISIBLE_DEVICES=4; lower execution\.cluster\.processes"
        ):
            _gpu(1)


def test_without_it_there_is_one_line_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv(VLLM_PYTHON, str(tmp_path / "nothing"))
    inputs = {"hf": hf_artifact(tmp_path / "e", talkative_hf_dir()), "samples": samples_artifact(tmp_path / "s", [])}
    with pytest.raises(InputError, match=r"ATHANOR_VLLM_PYTHON=.* is no program") as error:
        run_stage(STAGE, AnswerConfig(max_new_tokens=9, engine="vllm"), inputs, tmp_path / "root")
    assert "\n" not in str(error.value)
    check_engine("transformers")


def test_an_adapter_that_vllm_refuses_is_one_line(tmp_path):
    adapter = AdapterDirectory(write_adapter(tmp_path / "adapter", talkative_hf_dir(), kind="dora"))
    with pytest.raises(InputError, match=r"it is a DoRA, which vLLM has not; take engine=transformers, or the merged"):
        check_engine("vllm", adapter)
