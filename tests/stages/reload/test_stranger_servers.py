"""The loaders of vLLM and SGLang, against modules with their interfaces: they themselves were never run."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from stages.reload import stranger
from stages.reload.stranger import Sglang, Vllm
from tests.helpers.evaluation import picture
from tests.helpers.tiny_model import tiny_hf_dir

END = 9
EXPECTED = ([5, 6, -1], [5, 7, -1], [5, 8], [5])


@pytest.fixture
def asked_of_sglang(monkeypatch) -> list[dict]:
    """Replace SGLang by a module that answers 5, 6 and the end, and record what it is asked."""
    calls: list[dict] = []

    class Engine:
        def __init__(self, **settings):
            calls.append(settings)

        def generate(self, **request):
            calls.append(request)
            places = [[(-0.25, token, None), (-2.0, 7, None)] for token in (5, 6, END)]
            return {"text": "", "output_ids": [5, 6, END], "meta_info": {"output_top_logprobs": places}}

        def shutdown(self):
            calls.append({})

    module = ModuleType("sglang")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "sglang", module)
    return calls


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """Replace vLLM by a module that answers 5, 6 and the end, and record what it is asked."""
    calls: list[dict] = []

    class LLM:
        def __init__(self, model, trust_remote_code, generation_config):
            calls.append({"model": model, "remote": trust_remote_code, "generation": generation_config})

        def chat(self, messages, sampling, use_tqdm, chat_template_kwargs):
            calls.append({"messages": messages, "sampling": sampling, **chat_template_kwargs})
            logprobs = [
                {token: SimpleNamespace(logprob=-0.25), 7: SimpleNamespace(logprob=-2.0)} for token in (5, 6, END)
            ]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6, END], logprobs=logprobs)])]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, lambda **settings: settings
    monkeypatch.setitem(sys.modules, "vllm", module)
    return calls


def check_rows(rows: list[dict]) -> None:
    """Check the comparisons of 5, 6 and the end with EXPECTED."""
    assert [row["position"] for row in rows] == [None, 1, 1, 1]
    assert rows[1] | {"margin": 1.75} == rows[1] and rows[1]["theirs"] == 6 and rows[1]["ours"] == 7
    assert all("margin" not in row for row in (rows[0], *rows[2:]))


def test_sglang_gets_the_prompt_of_the_template_and_is_ended(asked_of_sglang, tmp_path):
    (tmp_path / "0.png").write_bytes(picture(1))
    question = {"question": "<image>Which?", "system": "Be brief.", "images": ["0.png"]}
    job = {"hf_dir": str(tiny_hf_dir()), "questions": str(tmp_path), "ends": [END]}
    check_rows([Sglang(job).answer({**question, "ids": ids}, 4, {}) for ids in EXPECTED])
    settings, request = asked_of_sglang[:2]
    assert settings == {"model_path": str(tiny_hf_dir()), "trust_remote_code": False}
    assert "Be brief." in request["prompt"] and request["prompt"].count("<|image_pad|>") == 1
    assert request["image_data"] == [str(tmp_path / "0.png")]
    assert request["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 4, "stop_token_ids": [END]}
    asked = {"questions": [], "limit": 4, "patch_format": {}}
    assert stranger._ask("sglang", job, asked)["error"] == "" and asked_of_sglang[-1] == {}


def test_vllm_is_asked_by_chat_and_its_first_other_token_has_a_margin(asked, tmp_path):
    (tmp_path / "0.png").write_bytes(picture(1))
    question = {"question": "<image>Which?", "system": "Be brief.", "images": ["0.png"]}
    loader = Vllm({"hf_dir": "hf", "questions": str(tmp_path), "ends": [END]})
    check_rows([loader.answer({**question, "ids": ids}, 4, {}) for ids in EXPECTED])
    assert asked[0] == {"model": "hf", "remote": False, "generation": "vllm"}
    assert asked[1]["enable_thinking"] is False and asked[1]["sampling"]["temperature"] == 0.0
    system, user = asked[1]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["image_pil", "text"]
    assert json.dumps(user["content"][1]) == '{"type": "text", "text": "Which?"}'
