"""OpenAI's own Python client against the server: images, streams, turns, errors, and the example of docs/serve.md."""

import re
import threading
import time
from pathlib import Path

import openai
import pytest
import uvicorn

from flows.prefect_server.ports import any_port
from flows.serve.application import make_app
from flows.serve.served_model import LocalModel
from flows.serve.votes import Votes
from stages.answer.greedy_decoder import PoolLimits
from stages.chat.text_stream import TextStream
from tests.flows.serve.test_completions import LOGIN, NAMES, image_part, text_part
from tests.helpers.evaluation import picture, talkative_hf_dir

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)

SERVE_PAGE = Path(__file__).parents[3] / "docs" / "serve.md"
QUESTION = {"role": "user", "content": [image_part(picture(3)), text_part("Which digit?")]}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Yield the address of the API of a server that listens."""
    port = any_port("127.0.0.1")
    model = LocalModel("tiny", talkative_hf_dir(), None, PoolLimits(4, 1 << 20))
    app = make_app([model], Votes(tmp_path_factory.mktemp("votes") / "votes.jsonl"), 12, 40, LOGIN, NAMES)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="word", max_retries=0) as client:
        yield client


def ask(client, messages=(QUESTION,), **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "max_tokens": 12, **fields})


def test_an_image_streamed_and_whole(client):
    (model,) = client.models.list()
    assert model == client.models.retrieve("tiny")
    whole = ask(client)
    (choice,) = whole.choices
    assert choice.message.content and choice.finish_reason in ("stop", "length")
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason and last.usage == whole.usage


def test_an_answer_is_sent_back_as_the_client_read_it(client):
    """The answer of these weights holds control characters, which a person's text may not."""
    answer = ask(client).choices[0].message
    assert re.search(r"[\x00-\x08]", answer.content)
    again = {"role": "user", "content": "Are you\r\nsure?"}
    second = ask(client, [QUESTION, answer, again]).choices[0].message.content
    assert second != ask(client, [again]).choices[0].message.content
    assert (
        second
        == ask(client, [QUESTION, answer, {"role": "user", "content": "Are you\nsure?"}]).choices[0].message.content
    )
    empty = {"role": "assistant", "content": ""}
    assert ask(client, [QUESTION, empty, again]).choices[0].message.content


def test_errors_are_those_that_the_client_knows(client, url):
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; tiny") as unknown:
        ask(client, model="other")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="top_k: this server does not know the field") as wrong:
        ask(client, extra_body={"top_k": 4})
    assert wrong.value.param == "top_k" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="programs are served at /v1/models and /v1/chat/completions"):
        client.responses.create(model="tiny", input="Which?")
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


def test_an_answer_that_fails_in_its_middle_is_an_error_of_the_client(client, monkeypatch):
    push = TextStream.push

    def failing(self, ids):
        if len(self._ids) > 3:
            raise RuntimeError("out of memory")
        return push(self, ids)

    monkeypatch.setattr(TextStream, "push", failing)
    with pytest.raises(openai.InternalServerError, match="the answer failed"):
        ask(client)
    with pytest.raises(openai.APIError, match="the answer failed"):
        list(ask(client, stream=True))


def test_the_documents_example_runs(client, url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("digit.png").write_bytes(picture(3))
    (example,) = re.findall(r"```python\n(.*?)```", SERVE_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000/v1", url).replace('api_key="..."', 'api_key="word"'), {})
    shown = [image_part(picture(3)), text_part("Which digit is in the picture?")]
    assert (
        capsys.readouterr().out
        == ask(client, [{"role": "user", "content": shown}], max_tokens=40).choices[0].message.content
    )
