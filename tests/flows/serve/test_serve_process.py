"""`athanor serve` as a process: sixteen users, clients that hang up, foreign pages, the page in a browser, Ctrl-C."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from dataset_builders.contracts.sample import Message
from stages.answer.transformers_engine import Generator
from stages.chat.conversation import prompt_of
from tests.helpers.browser import chromium, requires_chromium
from tests.helpers.evaluation import picture, talkative_hf_dir
from tests.helpers.serving import ask, chat, serving

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
        "and failures harm nobody else."
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("serve")
    with serving([talkative_hf_dir(), talkative_hf_dir()], directory / "root", "--max-tokens", "400") as server:
        yield server


@pytest.fixture(scope="module")
def model(server):
    models = httpx.get(f"{server.url}/v1/models", headers=server.headers).json()["data"]
    return models[0]["id"]


def test_sixteen_users_at_once_get_the_answers_of_the_answer_stage(server, model):
    generator = Generator(talkative_hf_dir())
    images = [picture(n, 40 + 24 * (n % 5), 40 + 16 * (n % 7)) for n in range(16)]
    prompts = [
        prompt_of(generator, [Message(role="user", text=f"<image>Digit {n}?")], [i]) for n, i in enumerate(images)
    ]
    wanted = [generator.generate([prompt], 30)[0].text for prompt in prompts]
    bodies = [chat(model, f"Digit {n}?", [i], max_tokens=30) for n, i in enumerate(images)]
    with ThreadPoolExecutor(16) as users:
        got = list(users.map(lambda body: ask(server, body), bodies))
    assert [completion["choices"][0]["message"]["content"] for completion in got] == wanted
    assert len(set(wanted)) > 8


def test_the_password_is_not_printed_where_others_may_read(server):
    printed = server.output.read_text()
    assert server.key not in printed and "serve-password" in printed
    assert (server.output.parent / "root" / "service" / "serve-password").stat().st_mode & 0o077 == 0


def test_a_foreign_page_and_a_client_without_key_get_nothing(server, model):
    body = chat(model, "Which?")
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer x"}, 401),
        ({**server.headers, "Origin": "http://evil.example"}, 403),
        ({**server.headers, "Origin": "http://localhost:1"}, 403),
        ({**server.headers, "Host": "evil.example"}, 400),
    ):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == status and "choices" not in answer.text
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_client_that_hangs_up_does_no_harm(server, model):
    body = json.dumps(chat(model, "How many?", max_tokens=400, stream=True)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    for length in (len(body), len(body) + 100):  # hangs up in the answer, and in its own request
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\n"
            client.sendall(f"{head}Authorization: Bearer {server.key}\r\n\r\n".encode() + body)
            time.sleep(0.3)
    assert ask(server, chat(model, "Which?", max_tokens=3))["usage"]["completion_tokens"] <= 3
    assert "Traceback" not in server.output.read_text()


@requires_chromium
@pytest.mark.parametrize("width", [1440, 400])
def test_a_person_asks_two_models_and_votes(server, model, width, tmp_path):
    (tmp_path / "digit.png").write_bytes(picture(3))
    votes = server.output.parent / "root" / "votes.jsonl"
    before = len(votes.read_text().splitlines())
    with chromium() as browser:
        credentials = {"username": "athanor", "password": server.key}
        context = browser.new_context(http_credentials=credentials, viewport={"width": width, "height": 1000})
        page, complaints, foreign = context.new_page(), [], []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text))
        page.on("request", lambda asked: foreign.append(asked.url))
        page.goto(server.url)
        (tmp_path / "cut.png").write_bytes(picture(3)[:20])
        page.set_input_files("#file", [tmp_path / "cut.png", tmp_path / "digit.png"])
        page.get_by_text("cut.png is not an image that can be read").wait_for()
        page.get_by_role("textbox", name="Question").fill("Which digit is in the picture?")
        page.locator("#max-tokens").evaluate("box => box.value = 20")
        page.keyboard.press("Enter")
        page.get_by_text("Which answer is better?").wait_for()
        headings = page.locator(".answer h2")
        assert headings.all_inner_texts() == ["Answer A", "Answer B"]
        page.keyboard.press("1")
        page.get_by_text("Vote stored").wait_for()
        assert model in headings.all_inner_texts()
        page.locator("#max-tokens").evaluate("box => box.value = 4000")
        page.get_by_role("button", name="Ask").click()
        page.get_by_text("max_tokens: 4000 is too much").first.wait_for()
        assert page.get_by_text("voted for").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    rows = [json.loads(line) for line in votes.read_text().splitlines()[before:]]
    assert len(rows) == 1 and rows[0]["blind"] and rows[0]["vote"] == rows[0]["answers"][0]["model"]
    assert (votes.parent / rows[0]["images"][0]).read_bytes() == picture(3)
    assert all("400 (Bad Request)" in line for line in complaints), complaints
    assert all(url.startswith((server.url, "data:", "blob:")) for url in foreign)


def test_ctrl_c_ends_it_while_it_answers(tmp_path):
    with serving([talkative_hf_dir()], tmp_path / "root", "--max-tokens", "4000") as server:
        name = httpx.get(f"{server.url}/v1/models", headers=server.headers).json()["data"][0]["id"]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)
        answer = client.chat.completions.create(**chat(name, "How many?", max_tokens=4000), stream=True)
        next(answer)
        start = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - start < 15
        with pytest.raises(openai.APIError, match="the server was stopped"):
            list(answer)
        assert server.output.read_text().rstrip().endswith("stopped") and "Traceback" not in server.output.read_text()
