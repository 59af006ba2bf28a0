"""The chat API on an embedded model: answers, streams, errors that name the field, and clients that hang up."""

import asyncio
import base64
import io
import json
import threading
import time
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from dataset_builders.contracts.sample import Message
from flows.serve import bodies
from flows.serve.api_error import ApiError
from flows.serve.application import make_app
from flows.serve.bodies import MOST_BYTES
from flows.serve.served_model import LocalModel
from flows.serve.votes import Votes
from stages.answer.greedy_decoder import GreedyDecoder, PoolLimits
from stages.answer.transformers_engine import Generator
from stages.chat.conversation import prompt_of
from stages.chat.text_stream import TextStream
from tests.helpers.evaluation import picture, talkative_hf_dir

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)

LOGIN, NAMES = "athanor:word", ["localhost", "127.0.0.1"]
KEY = {"Authorization": "Bearer word"}
MOST_TOKENS, ROWS, QUEUE = 40, 4, 12


@pytest.fixture(scope="module")
def alone():
    """Return a function that answers one conversation with nothing beside it."""
    generator = Generator(talkative_hf_dir())

    def answer(text, images=(), max_tokens=12):
        prompt = prompt_of(generator, [Message(role="user", text=text)], images)
        return generator.generate([prompt], max_tokens)[0]

    return answer


@pytest.fixture(scope="module")
def model():
    model = LocalModel("tiny", talkative_hf_dir(), None, PoolLimits(ROWS, 1 << 20))
    yield model
    model.close()


@pytest.fixture(scope="module")
def app(model, tmp_path_factory):
    votes = Votes(tmp_path_factory.mktemp("votes") / "votes.jsonl")
    return make_app([model], votes, QUEUE, MOST_TOKENS, LOGIN, NAMES)


@pytest.fixture(scope="module")
def client(app):
    return TestClient(app, base_url="http://localhost:8000", headers=KEY)


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def body_of(*parts, **fields) -> dict:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12, **fields}


def ask(client, *parts, **fields) -> dict:
    answer = client.post("/v1/chat/completions", json=body_of(*parts, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(completion: dict) -> str:
    return completion["choices"][0]["message"]["content"]


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_is_the_one_that_is_scored(client, alone):
    data = picture(3, 72, 40)
    wanted = alone("<image>Which digit is this?", [data])
    got = ask(client, image_part(data), text_part("Which digit is this?"))
    assert text_of(got) == wanted.text and wanted.text
    assert got["object"] == "chat.completion" and got["model"] == "tiny"
    assert got["choices"][0]["finish_reason"] == ("stop" if wanted.stopped else "length")
    assert got["usage"]["completion_tokens"] == wanted.num_tokens + wanted.stopped
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + got["usage"]["completion_tokens"]


def test_several_images_stand_where_they_were_put(client, alone):
    one, two = picture(1, 40, 64), picture(2, 64, 40)
    got = ask(client, text_part("Left:"), image_part(one), text_part("right:"), image_part(two), text_part("larger?"))
    assert text_of(got) == alone("Left:<image>right:<image>larger?", [one, two]).text


def test_a_stream_has_the_same_text_piece_by_piece(client):
    parts = (image_part(picture(5)), text_part("How many strokes?"))
    whole = ask(client, *parts)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post("/v1/chat/completions", json=body_of(*parts, **options))
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant" and len(deltas) > 4
    assert "".join(delta.get("content", "") for delta in deltas) == text_of(whole)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_turns_and_a_system_message_are_read(client):
    turns = [("system", "Answer in words."), ("user", "Which digit?"), ("assistant", "four"), ("user", "Again?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    with_all = text_of(ask(client, "x", messages=messages))
    assert with_all not in (text_of(ask(client, "x", messages=messages[1:])), text_of(ask(client, "Again?")))
    developer = [{**messages[0], "role": "developer"}, *messages[1:]]
    assert text_of(ask(client, "x", messages=developer)) == with_all


def test_an_answer_may_be_sent_back_as_it_came_and_null_is_no_value(client):
    """OpenAI's client sends an answer's fields back, those without a value as null."""
    first = {"role": "user", "content": "Which digit?"}
    answer = ask(client, "x", messages=[first], max_tokens=4, tools=None, stop=None)["choices"][0]["message"]
    assert answer["refusal"] is None
    sent = [first, {**answer, "tool_calls": None}, {"role": "user", "content": "Again?"}]
    plain = [first, {"role": "assistant", "content": answer["content"]}, sent[2]]
    assert text_of(ask(client, "x", messages=sent)) == text_of(ask(client, "x", messages=plain))


def test_a_stop_text_ends_the_answer_before_it(client):
    whole = text_of(ask(client, "How many?"))
    stop = whole[3:5]
    got = ask(client, "How many?", stop=stop)
    assert text_of(got) == whole[: whole.index(stop)] and got["choices"][0]["finish_reason"] == "stop"
    answer = client.post("/v1/chat/completions", json=body_of("How many?", stop=["never", stop], stream=True))
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(answer.text)]
    assert "".join(deltas) == text_of(got)


def test_max_tokens_cuts(client):
    got = ask(client, "How many?", max_tokens=None, max_completion_tokens=3)
    assert got["usage"]["completion_tokens"] == 3 and got["choices"][0]["finish_reason"] == "length"


def test_a_seed_draws_the_same_answer_whoever_asks_beside_it(client):
    drawn = {seed: text_of(ask(client, "How many?", temperature=1.5, seed=seed)) for seed in (1, 2)}
    assert drawn[1] != drawn[2]
    asked = [{"temperature": 1.5, "seed": 1}, {}, {"temperature": 1.5, "seed": 2}, {}]
    got = at_once([lambda fields=fields: text_of(ask(client, "How many?", **fields)) for fields in asked])
    greedy = text_of(ask(client, "How many?"))
    assert got == [drawn[1], greedy, drawn[2], greedy]
    assert text_of(ask(client, "How many?", temperature=1.5, top_p=1e-9)) == greedy


def at_once(calls):
    results = [None] * len(calls)

    def run(place):
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_many_at_once_get_the_answers_of_one_alone(client, alone, monkeypatch):
    """More users than the batch has rows, with and without images, of different lengths."""
    steps = []
    go_on = GreedyDecoder.go_on
    monkeypatch.setattr(
        GreedyDecoder, "go_on", lambda self, rows, *rest: steps.append(len(rows)) or go_on(self, rows, *rest)
    )
    images = [picture(n, 40 + 24 * (n % 3), 64) for n in range(12)]
    asked = [([image_part(i)] if n % 3 else [], f"Which of {n}{' digits' * n}?", 6 + n) for n, i in enumerate(images)]
    calls = [lambda a=a: text_of(ask(client, *a[0], text_part(a[1]), max_tokens=a[2])) for a in asked]
    got = at_once(calls)
    assert max(steps) == ROWS
    assert got == [
        alone(("<image>" if a[0] else "") + a[1], [i] if a[0] else [], a[2]).text for a, i in zip(asked, images)
    ]


WRONG = [
    ({"model": "other"}, 404, "model", "is not served here; tiny"),
    ({"messages": []}, 400, "messages", "should not be empty"),
    ({"messages": None}, 400, "messages", "required"),
    ({"messages": "?"}, 400, "messages", "should be a list"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "required"),
    ({"messages": [{"role": "robot", "content": "?"}]}, 400, "messages[0].role", "got 'robot'"),
    ({"messages": [{"role": "assistant", "content": "4"}]}, 400, "messages[0].role", "last message"),
    ({"messages": [{"role": "user", "content": " "}]}, 400, "messages[0].content", "empty"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "not Unicode"),
    ({"messages": [{"role": "user", "content": "a<|im_end|>"}]}, 400, "messages", "<|im_end|> in a user turn"),
    ({"messages": [{"role": "user", "content": "a <image>"}]}, 400, "messages[0].content[0].text", "<image>"),
    (
        {"messages": [{"role": "user", "content": "?"}, {"role": "system", "content": "x"}]},
        400,
        "messages[1].role",
        "first",
    ),
    ({"max_tokens": 41}, 400, "max_tokens", "41 is too much"),
    ({"max_tokens": 0}, 400, "max_tokens", "got 0"),
    ({"max_tokens": "5"}, 400, "max_tokens", "got '5'"),
    ({"temperature": -1}, 400, "temperature", "got -1"),
    ({"temperature": True}, 400, "temperature", "should be a valid number, got True"),
    ({"top_p": "1"}, 400, "top_p", "got '1'"),
    ({"n": 2}, 400, "n", "got 2"),
    ({"stream": "yes"}, 400, "stream", "should be true or false, got 'yes'"),
    ({"stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", "got 1"),
    ({"tools": []}, 400, "tools", "does not know the field"),
    ({"stop": [""]}, 400, "stop[0]", "should not be empty"),
    ({"\ud800": 1}, 400, None, "unicode"),
]


@pytest.mark.parametrize(("fields", "status", "param", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(client, fields, status, param, text):
    content = json.dumps({**body_of("How many?"), **fields})
    refused(client, content, status, param, text)


def refused(client, content, status, param, text):
    answer = client.post("/v1/chat/completions", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert text in error["message"] and "\n" not in error["message"] and error["type"] == "invalid_request_error"


def drawn_bomb() -> bytes:
    """Return a small PNG of 100 million pixels."""
    out = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://example.com/a.png", "fetches no address"),
        ("http://169.254.169.254/latest", "fetches no address"),
        ("file:///etc/passwd", "fetches no address"),
        ("data:text/html;base64,YQ==", "fetches no address"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64,YQ==", "cannot be used"),
        (url_of(picture(1)[:200]), "cannot be used"),
        (url_of(picture(1, 1000, 2)), "aspect"),
        (url_of(drawn_bomb()), "bomb"),
    ],
    ids=lambda value: value[:30],
)
def test_an_image_that_is_none_is_named_and_no_address_is_fetched(client, url, text):
    parts = (image_part(picture(2)), {"type": "image_url", "image_url": {"url": url}}, text_part("?"))
    refused(client, json.dumps(body_of(*parts)), 400, "messages[0].content[1].image_url.url", text)


def test_a_body_that_is_no_json_or_too_long(client):
    refused(client, "{", 400, None, "not JSON")
    refused(client, "[" * 100_000, 400, None, "not JSON")
    refused(client, "[]", 400, None, "mapping of names")
    refused(client, "x" * (MOST_BYTES + 1), 413, None, "longer than 20 MiB")


def test_a_prompt_longer_than_the_context(client, monkeypatch):
    monkeypatch.setattr(Generator, "context_length", 30)
    refused(client, json.dumps(body_of("How many?" * 20)), 400, "messages", "context has 30")


def test_a_prompt_longer_than_the_server_takes(client, model, monkeypatch):
    monkeypatch.setattr(model, "_context", 25)
    refused(client, json.dumps(body_of("How many?" * 20)), 400, "messages", "this server takes 25 together")
    refused(client, json.dumps(body_of("a" * 801)), 400, "messages", "801 characters, and this server takes 800")


def test_models_are_listed(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/tiny").json() == model and model["id"] == "tiny"
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/other").json()["error"]["message"].startswith("GET /v1/other")
    assert client.get("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("when", ["prompt", "step", "text"])
def test_one_answer_that_fails_is_the_only_one(client, alone, monkeypatch, when):
    """The answer that cannot be generated gets 500, whether its prompt, a later step or its text fails; those beside it
    end."""
    read, go_on, push = GreedyDecoder.read, GreedyDecoder.go_on, TextStream.push

    def cursed(rows):
        return any(row.limit == 13 for row in rows)

    def reading(self, prompts, cache):
        if cursed(prompts.rows) and when != "text" and (prompts.rows[0].ids or when == "prompt"):
            raise RuntimeError("out of memory")
        return read(self, prompts, cache)

    def going(self, rows, *rest):
        if cursed(rows) and when == "step" and max(len(row.ids) for row in rows if row.limit == 13) > 3:
            raise RuntimeError("out of memory")
        return go_on(self, rows, *rest)

    def pushing(self, ids):
        if when == "text" and self._stops and len(self._ids) > 3:
            raise RuntimeError("out of memory")
        return push(self, ids)

    monkeypatch.setattr(TextStream, "push", pushing)
    monkeypatch.setattr(GreedyDecoder, "read", reading)
    monkeypatch.setattr(GreedyDecoder, "go_on", going)
    wanted = [alone(f"How many {n}?", (), 30).text for n in range(3)]
    calls = [lambda n=n: text_of(ask(client, f"How many {n}?", max_tokens=30)) for n in range(3)]
    calls.append(lambda: client.post("/v1/chat/completions", json=body_of("How many?", max_tokens=13, stop="never")))
    *got, failed = at_once(calls)
    assert got == wanted
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    assert "memory" not in failed.text
    streamed = client.post("/v1/chat/completions", json=body_of("How many?", max_tokens=13, stop="never", stream=True))
    error = streamed.json() if when == "prompt" else events(streamed.text)[-1]
    assert error["error"]["type"] == "server_error" and streamed.status_code == (500 if when == "prompt" else 200)


# Clients that hang up, and more clients than places


def call(app, body: dict, is_whole: bool = True) -> "Call":
    return Call(app, json.dumps(body).encode(), is_whole)


class Call:
    """One request, made without a client, which may hang up before the response ends."""

    def __init__(self, app, content: bytes, is_whole: bool) -> None:
        self.sent, self._gone = [], asyncio.Event()
        self._bodies = [{"type": "http.request", "body": content, "more_body": not is_whole}]
        self._app = app

    async def run(self) -> list[dict]:
        headers = [(b"host", b"localhost:8000"), (b"authorization", b"Bearer word")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        scope |= {"query_string": b"", "server": ("localhost", 8000), "scheme": "http", "root_path": ""}
        await self._app(scope, self._receive, self._send)
        return self.sent

    async def _receive(self) -> dict:
        if self._bodies:
            return self._bodies.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.sent.append(message)

    def hang_up(self) -> None:
        self._gone.set()


LONG = 40


def test_slow_clients_keep_nobody_out_and_are_told(app, monkeypatch):
    """The bodies of as many clients as there are places never end."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 2.0)

    async def beside_slow_ones():
        slow = [call(app, body_of("How many?", max_tokens=2), is_whole=False) for _ in range(QUEUE)]
        tasks = [asyncio.ensure_future(each.run()) for each in slow]
        await asyncio.sleep(0.1)
        answer = await call(app, body_of("How many?", max_tokens=2)).run()
        return answer[0]["status"], {sent[0]["status"] for sent in await asyncio.gather(*tasks)}

    assert asyncio.run(beside_slow_ones()) == (200, {408})


@pytest.fixture
def slow(monkeypatch):
    """Make each step take two hundredths of a second, and return the numbers of running rows."""
    steps: list[int] = []
    go_on = GreedyDecoder.go_on

    def going(self, rows, *rest):
        steps.append(sum(not row.ended for row in rows))
        time.sleep(0.02)
        return go_on(self, rows, *rest)

    monkeypatch.setattr(GreedyDecoder, "go_on", going)
    return steps


@pytest.fixture
def endless(model, monkeypatch):
    monkeypatch.setattr(model._generator.decoder, "end_ids", frozenset())


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_frees_its_row(app, model, slow, endless, streamed):
    """The first of the two hangs up when both are running. The second ends as if it were alone."""

    async def both():
        first = call(app, body_of("How many?", max_tokens=LONG, stream=streamed))
        second = call(app, body_of("Which one?", max_tokens=LONG, stream=True))
        tasks = [asyncio.ensure_future(c.run()) for c in (first, second)]
        while 2 not in slow and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        first.hang_up()
        return await asyncio.gather(*tasks)

    first, second = asyncio.run(both())
    assert len(first) < LONG if streamed else first == []
    assert b"[DONE]" in second[-1]["body"] and len(slow) >= LONG - 1
    assert 2 in slow and slow[-1] == 1
    assert slow.count(2) < 30, "the row of the first is generated on"


def test_a_question_that_waits_is_forgotten_when_its_client_hangs_up(app, slow, endless, monkeypatch):
    read, limits = GreedyDecoder.read, []

    def reading(self, prompts, cache):
        limits.extend(row.limit for row in prompts.rows)
        return read(self, prompts, cache)

    monkeypatch.setattr(GreedyDecoder, "read", reading)

    async def five():
        running = [call(app, body_of(f"How many {n}?", max_tokens=20)) for n in range(ROWS)]
        tasks = [asyncio.ensure_future(c.run()) for c in running]
        await asyncio.sleep(0.1)
        waiting = call(app, body_of("Which?", max_tokens=33))
        tasks.append(asyncio.ensure_future(waiting.run()))
        await asyncio.sleep(0.02)
        waiting.hang_up()
        return await asyncio.gather(*tasks, call(app, body_of("And then?", max_tokens=2)).run())

    *answers, nothing, last = asyncio.run(five())
    assert all(sent[0]["status"] == 200 for sent in [*answers, last]) and nothing == []
    assert sorted(limits) == [2, *[20] * ROWS], "the question whose client has gone is read"


def test_more_requests_than_places_get_429(app, slow, endless):
    async def all_at_once():
        calls = [call(app, body_of("How many?", max_tokens=20)) for _ in range(QUEUE + 3)]
        return await asyncio.gather(*(c.run() for c in calls))

    sent = asyncio.run(all_at_once())
    states = sorted(messages[0]["status"] for messages in sent)
    assert states == [200] * QUEUE + [429] * 3
    (refusal,) = {messages[1]["body"] for messages in sent if messages[0]["status"] == 429}
    assert json.loads(refusal)["error"]["code"] == "rate_limit_exceeded"
    again = asyncio.run(call(app, body_of("How many?")).run())
    assert again[0]["status"] == 200, "the places are free again"


# Who gets in


@pytest.mark.parametrize("path", ["/", "/page.js", "/v1/models", "/v1/chat/completions", "/votes"])
def test_nobody_gets_in_without_the_password_and_no_foreign_page_with_it(app, path):
    nobody = TestClient(app, base_url="http://localhost:8000")
    method = "POST" if path in ("/v1/chat/completions", "/votes") else "GET"
    assert nobody.request(method, path).status_code == 401
    assert nobody.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    for origin in ("http://evil.example", "null", "http://localhost:9000"):
        answer = nobody.request(method, path, headers={**KEY, "Origin": origin})
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert nobody.request(method, path, headers={**KEY, "Host": "evil.example"}).status_code == 400
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": method}
    assert nobody.request("OPTIONS", path, headers=preflight).status_code == 403


def test_the_page_loads_nothing_foreign(client):
    answer = client.get("/", auth=("athanor", "word"), headers={"Authorization": ""})
    assert answer.status_code == 200 and "text/html" in answer.headers["content-type"]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self';" in policy and "unsafe" not in policy


# Votes


def vote(**fields) -> dict:
    answers = [{"model": "tiny", "text": "four"}, {"model": "other", "text": "five"}]
    return {"question": "Which?", "images": [], "answers": answers, "vote": "tiny", "blind": True, **fields}


def test_votes_of_many_at_once_are_all_there(client, tmp_path, monkeypatch):
    path = tmp_path / "votes.jsonl"
    both = [Votes(path), Votes(path)]
    long = "word " * 20_000  # longer than a pipe's or a buffer's write
    at_once([lambda n=n: both[n % 2].add(vote(question=f"{n} {long}")) for n in range(24)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(int(row["question"].split()[0]) for row in rows) == list(range(24))
    assert {row["vote"] for row in rows} == {"tiny"}


def test_a_vote_after_half_a_line_is_a_line(tmp_path):
    path = tmp_path / "votes.jsonl"
    Votes(path).add(vote())
    with path.open("a") as file:
        file.write('{"time": "2026')
    Votes(path).add(vote(vote="neither"))
    first, half, second = path.read_text().splitlines()
    assert (json.loads(first)["vote"], half, json.loads(second)["vote"]) == ("tiny", '{"time": "2026', "neither")


def test_a_vote_keeps_its_images_beside_it(app, client):
    data = picture(7)
    answer = client.post("/votes", json=vote(images=[url_of(data), url_of(data)], vote="both"))
    assert answer.status_code == 200, answer.text
    directory = next(route for route in [app.app.app.routes[-1]]).endpoint.__self__._votes.path.parent
    row = json.loads((directory / "votes.jsonl").read_text().splitlines()[-1])
    assert row["vote"] == "both" and len(set(row["images"])) == 1
    assert (directory / row["images"][0]).read_bytes() == data


def test_a_vote_on_a_full_disk_is_told_and_its_image_is_not_taken_as_whole(tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(path, data):
        write(path, data[:100])
        raise OSError(28, "No space left on device")

    votes, data = Votes(tmp_path / "votes.jsonl"), picture(7)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ApiError, match=r"votes.jsonl: No space left on device") as error,
    ):
        patch.setattr(Path, "write_bytes", full)
        votes.add(vote(images=[url_of(data)]))
    assert error.value.status == 507
    votes.add(vote(images=[url_of(data)]))
    (image,) = (tmp_path / "votes-images").iterdir()
    assert image.read_bytes() == data


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"vote": "third"}, None), ({"answers": []}, "answers"), ({"images": ["https://x/y.png"]}, "images[0]")],
)
def test_a_wrong_vote_is_named(client, fields, param):
    answer = client.post("/votes", json=vote(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
