"""The loader of vLLM, against a module with its interface."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from stages.verify.loaders import Vllm
from tests.helpers.evaluation import picture

END = 9


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """Replace vLLM by a module that answers 5, 6 and the end, and record what it is asked."""
    calls: list[dict] = []

    class LLM:
        def __init__(self, model, trust_remote_code, generation_config):
            calls.append({"model": model, "remote": trust_remote_code, "generation": generation_config})

        def chat(self, messages, sampling, use_tqdm, chat_template_kwargs):
            calls.append({"messages": messages, "sampling": sampling, **chat_template_kwargs})
            near, far = SimpleNamespace(logprob=-0.25), SimpleNamespace(logprob=-2.0)
            logprobs = [{token: near, 7: far} for token in (5, 6, END)]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6, END], logprobs=logprobs)])]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, lambda **settings: settings
    monkeypatch.setitem(sys.modules, "vllm", module)
    return calls


def test_vllm_is_asked_by_chat_and_its_first_other_token_has_a_margin(asked, tmp_path):
    (tmp_path / "0.png").write_bytes(picture(1))
    question = {"question": "<image>Which?", "system": "Be brief.", "images": ["0.png"]}
    loader = Vllm({"hf_dir": "hf", "questions": str(tmp_path), "ends": [END]})
    rows = [loader.answer({**question, "ids": ids}, 4, {}) for ids in ([5, 6, -1], [5, 7, -1], [5, 8], [5])]
    assert [row["position"] for row in rows] == [None, 1, 1, 1]
    assert rows[1] | {"margin": 1.75} == rows[1] and rows[1]["theirs"] == 6 and rows[1]["ours"] == 7
    assert all("margin" not in row for row in (rows[0], *rows[2:]))
    assert asked[0] == {"model": "hf", "remote": False, "generation": "vllm"}
    assert asked[1]["enable_thinking"] is False and asked[1]["sampling"]["temperature"] == 0.0
    system, user = asked[1]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"][0]["type"] == "image_pil" and user["content"][1] == {"type": "text", "text": "Which?"}
