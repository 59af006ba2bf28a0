"""The vLLM adapter against a module with vLLM's interface: what it passes and how it reads outputs. No vLLM is used."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from PIL import Image

from dataset_builders.errors import InputError
from stages.answer.engine import EngineSettings, Request, check_engine, make_engine
from stages.answer.heldout import ANSWERS_JSONL, read_answers
from stages.answer.stage import STAGE, AnswerConfig
from stages.answer.transformers_engine import Generator
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.evaluation import (
    answered,
    conversation,
    hf_artifact,
    mixed_samples,
    picture,
    samples_artifact,
    talkative_hf_dir,
)


@dataclass(frozen=True)
class SamplingParams:
    temperature: float
    max_tokens: int
    stop_token_ids: list
    detokenize: bool


class LLM:
    """Generates token 70 once per image of the question, then ends, unless the limit cuts it earlier."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.calls = options, []
        LLM.made.append(self)

    def generate(self, prompts, sampling, use_tqdm):
        assert use_tqdm is False
        self.calls.append((prompts, sampling))
        outputs = []
        for prompt, parameters in zip(prompts, sampling, strict=True):
            images = prompt.get("multi_modal_data", {}).get("image", [])
            ids = ([70 + len(images)] * 3 + [parameters.stop_token_ids[0]])[: parameters.max_tokens]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))]))
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    module.__spec__ = SimpleNamespace(name="vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "made", [])
    return module


def _engine(hf_dir=None, tokenized=None):
    hf_dir = hf_dir or talkative_hf_dir()
    prompt = read_prompt_format(ModelDirectory(hf_dir), tokenized)
    return make_engine("vllm", EngineSettings(ModelDirectory(hf_dir), prompt, batch_size=7, batch_tokens=999))


def _asked(number, images, max_new_tokens=9):
    slots = "<image>" * len(images)
    sample = conversation("a/00000000", [(f"{slots}Which?", "7")], images)
    return Request(number, sample.messages[:1], sample.images, max_new_tokens)


def test_the_model_is_loaded_without_its_sampling_settings(vllm):
    _engine()
    (llm,) = LLM.made
    assert llm.options["model"] == str(talkative_hf_dir()) and llm.options["max_num_seqs"] == 7
    assert llm.options["generation_config"] == "vllm" and llm.options["trust_remote_code"] is False


def test_other_limits_and_another_prompt_are_those_of_the_directory_it_gets(vllm, tmp_path):
    source = Path(shutil.copytree(talkative_hf_dir(), tmp_path / "hf"))
    preprocessor = json.loads((source / "preprocessor_config.json").read_text())
    (source / "processor_config.json").write_text(json.dumps({"image_processor": preprocessor}))
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    tokenized = {"min_pixels": 64 * 64, "max_pixels": 96 * 96, "system_prompt": "Be brief."}
    engine = _engine(source, tokenized)
    given = Path(LLM.made[0].options["model"])
    wanted = read_prompt_format(ModelDirectory(source), tokenized).pixels
    assert read_prompt_format(ModelDirectory(given)).pixels == wanted
    size = {"shortest_edge": 64 * 64, "longest_edge": 96 * 96}
    assert json.loads((given / "processor_config.json").read_text())["image_processor"]["size"] == size
    same = [name for name in before if name not in ("preprocessor_config.json", "processor_config.json")]
    assert all((given / name).samefile(source / name) for name in same) and "model.safetensors" in same
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert {file.name for file in given.iterdir()} == set(before)
    question = _asked(1, [picture(1, 64, 32)])
    list(engine.answer([engine.prepare([question])]))
    (prompt,), _ = LLM.made[0].calls[0]
    chat = ChatEncoder(ModelDirectory(source), system_prompt="Be brief.")
    assert prompt["prompt_token_ids"] == chat.prompt_ids(question.messages, [(1, 4, 6)]).tolist()


def test_its_own_limits_need_no_other_directory(vllm):
    own = read_prompt_format(ModelDirectory(talkative_hf_dir())).pixels
    for tokenized in ({}, {"max_pixels": own.max_pixels, "system_prompt": "Be brief."}):
        _engine(tokenized=tokenized)
    assert {llm.options["model"] for llm in LLM.made} == {str(talkative_hf_dir())}


def test_prompts_have_one_placeholder_an_image_and_the_pictures_in_order(vllm):
    engine, generator = _engine(), Generator(ModelDirectory(talkative_hf_dir()))
    pair = _asked(5, [picture(1, 64, 32), picture(2, 32, 96)])
    group = engine.prepare([_asked(4, []), pair])
    list(engine.answer([group]))
    ((text, both), sampling), end = LLM.made[0].calls[0], sorted(generator.decoder.end_ids)
    assert sampling == [SamplingParams(0.0, 9, end, False)] * 2
    assert "multi_modal_data" not in text
    image_id = generator.decoder.model.config.image_token_id
    assert both["prompt_token_ids"].count(image_id) == 2
    spliced = generator.encode_prompt(pair.messages, generator.encode_images(pair.images)).input_ids.tolist()
    without = [[token for token in ids if token != image_id] for ids in (both["prompt_token_ids"], spliced)]
    assert without[0] == without[1]
    shown = both["multi_modal_data"]["image"]
    assert [image.size for image in shown] == [(64, 32), (32, 96)] and all(type(i) is Image.Image for i in shown)


def test_answers_carry_their_number_and_say_whether_they_stopped(vllm):
    engine = _engine()
    groups = [engine.prepare([_asked(3, [picture(1)]), _asked(8, [], 2)]), engine.prepare([_asked(1, [])])]
    said = dict(engine.answer(groups))
    ended = {number: (answer.stopped, answer.num_tokens) for number, answer in said.items()}
    assert ended == {3: (True, 3), 8: (False, 2), 1: (True, 3)}
    assert said[3].text != said[1].text


def test_a_question_that_cannot_be_asked_is_skipped_with_its_reason(vllm):
    engine = _engine()
    bad = Request(2, _asked(2, [picture(1)]).messages, (b"no image",), 9)
    group = engine.prepare([bad])
    assert group.ready is None and group.skipped[2].reason == "decode_error"
    assert list(engine.answer([group])) == []


def test_the_stage_answers_with_it(vllm, tmp_path):
    samples = samples_artifact(tmp_path / "s", mixed_samples(6))
    inputs = {"hf": hf_artifact(tmp_path / "e", talkative_hf_dir()), "samples": samples}
    made = answered(AnswerConfig(max_new_tokens=9, engine="vllm"), inputs, tmp_path / "root")
    count = made.manifest.stats["counts"]["answers"]
    assert [line.num_tokens for line in read_answers(made.dir / ANSWERS_JSONL)] == [3] * count


def test_without_it_there_is_one_line_before_anything_is_made(tmp_path):
    inputs = {"hf": hf_artifact(tmp_path / "e", talkative_hf_dir()), "samples": samples_artifact(tmp_path / "s", [])}
    with pytest.raises(InputError, match=r"evaluate\.engine is 'vllm', which is not installed") as error:
        run_stage(STAGE, AnswerConfig(max_new_tokens=9, engine="vllm"), inputs, tmp_path / "root")
    assert "\n" not in str(error.value)
    check_engine("transformers")
