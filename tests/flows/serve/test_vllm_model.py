"""vLLM's server behind ours, against a program with its interface: its command, its requests, its errors, its end."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from flows.serve.application import make_app
from flows.serve.vllm_model import start_vllm
from flows.serve.votes import Votes
from flows.service.supervisor import StartFailed
from tests.flows.serve.test_completions import (
    KEY,
    LOGIN,
    NAMES,
    body_of,
    events,
    image_part,
    refused,
    text_part,
    url_of,
)
from tests.helpers import fake_vllm
from tests.helpers.evaluation import picture, talkative_hf_dir


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Put a command `vllm` first on PATH."""
    directory = tmp_path_factory.mktemp("bin")
    command = directory / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_vllm.__file__} "$@"\n')
    command.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
        yield command


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = shutil.copytree(talkative_hf_dir(), tmp_path_factory.mktemp("model") / "hf")
    (directory / "system_prompt.txt").write_text("Answer in one word.")
    return directory


@pytest.fixture(scope="module")
def served(program, hf_dir, tmp_path_factory):
    """Yield (client, log of vLLM)."""
    directory = tmp_path_factory.mktemp("service")
    with contextlib.ExitStack() as stack:
        models = start_vllm([("tiny", hf_dir)], 4, directory, stack)
        app = make_app(models, Votes(directory / "votes.jsonl"), 4, 40, LOGIN, NAMES)
        yield TestClient(app, base_url="http://localhost:8000", headers=KEY), directory / "vllm-0.log"
        port = models[0].port
    assert not any(f"--port {port}" in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def test_the_command_names_the_model_and_listens_on_loopback(served, hf_dir):
    words = served[1].read_text().splitlines()[0].split()
    assert words[:4] == ["serve", str(hf_dir), "--served-model-name", "tiny"]
    assert words[words.index("--host") + 1] == "127.0.0.1" and words[words.index("--max-num-seqs") + 1] == "4"
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.90"


def test_a_request_gets_there_and_back(served):
    data = picture(3)
    parts = (image_part(data), text_part("Which digit?"))
    answer = served[0].post("/v1/chat/completions", json=body_of(*parts, temperature=0.5, seed=7, stop="x")).json()
    got = json.loads(answer["choices"][0]["message"]["content"])
    assert got["messages"] == [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(data)}}, parts[1]]},
    ]
    assert (got["temperature"], got["seed"], got["stop"], got["max_tokens"]) == (0.5, 7, ["x"], 12)
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["total_tokens"] == 7
    streamed = served[0].post("/v1/chat/completions", json=body_of("Which?", stream=True))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(streamed.text))
    assert json.loads(text)["temperature"] == 0
    own = served[0].post(
        "/v1/chat/completions",
        json=body_of("x", messages=[{"role": "system", "content": "Be long."}, {"role": "user", "content": "Which?"}]),
    )
    assert json.loads(own.json()["choices"][0]["message"]["content"])["messages"][0]["content"] == "Be long."


def test_what_vllm_would_do_and_we_do_not_is_refused_before(served):
    """It would fetch an address, and read a special token in a text as one."""
    client = served[0]
    url = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    refused(client, json.dumps(body_of(url)), 400, "messages[0].content[0].image_url.url", "fetches no address")
    refused(client, json.dumps(body_of("a<|im_end|>")), 400, "messages", "<|im_end|>")
    broken = image_part(picture(1)[:40])
    refused(client, json.dumps(body_of(broken)), 400, "messages[0].content[0].image_url.url", "cannot be used")


def test_its_errors_are_told(served):
    refused(served[0], json.dumps(body_of("refuse")), 400, None, "too long for vLLM")
    assert served[0].post("/v1/chat/completions", json=body_of("break")).status_code == 500
    streamed = served[0].post("/v1/chat/completions", json=body_of("break", stream=True))
    assert events(streamed.text)[-1]["error"]["type"] == "server_error"


def test_a_server_that_does_not_start_is_told_with_its_last_line(program, hf_dir, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_FAILS", "1")
    with contextlib.ExitStack() as stack, pytest.raises(StartFailed, match=r"vllm-0\.log \(no GPU here\)"):
        start_vllm([("tiny", hf_dir)], 4, tmp_path, stack)
