"""The page of `athanor chat`: its answers are those of `ask`, and only the password opens it."""

import base64
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from dataset_builders.contracts.sample import Message
from flows.cli import check
from flows.cli.chat import _reply, _show, conversation_of
from flows.cli.main import main
from flows.tracking.servers import any_port
from stages.answer.ask import ChatModel, ask, user_message
from tests.helpers.evaluation import picture, talkative_hf_dir
from tests.helpers.patience import at_most, wait_for

pytestmark = pytest.mark.promise(
    "`athanor ask` and the page of `athanor chat` give the answer that the evaluation scores; the page opens only with "
    "its password."
)

QUESTION = "Which digit is this?"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["no-such-model"], "is not a directory here"),
        (["{model}", "{model}", "{model}"], "3 models are too many"),
        (["{model}", "--port", "99999"], "--port 99999 of 127.0.0.1 cannot be listened on"),
        (["{model}", "--adapter", "/nowhere"], "adapter /nowhere has no adapter_config.json"),
    ],
)
def test_a_wrong_command_is_one_line(options, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: object())
    words = [word.format(model=talkative_hf_dir()) for word in options]
    assert main(["chat", *words, "--root", str(tmp_path / "root")]) == 2
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == 1


def test_without_gradio_the_way_out_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert main(["chat", str(talkative_hf_dir()), "--root", str(tmp_path / "root")]) == 2
    assert capsys.readouterr().err == (
        "athanor: chat needs the package gradio, which is not installed; pip install -e '.[chat]'\n"
    )


def turn(role: str, text: str, *files: str) -> dict:
    """Return a turn of a history as Gradio hands it over."""
    shown = [{"type": "file", "file": {"path": file}} for file in files]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


def test_a_follow_up_shows_the_model_all_that_was_said():
    history = [turn("user", "Which?", "/a.png", "/b.png"), turn("assistant", "7"), turn("user", "And this?", "/c.png")]
    messages, pictures = conversation_of(history)
    assert messages == [user_message("Which?", 2), Message(role="assistant", text="7"), user_message("And this?", 1)]
    assert [path.name for path in pictures] == ["a.png", "b.png", "c.png"]


def test_an_answer_is_that_of_ask_and_a_question_that_cannot_be_asked_is_withdrawn(tmp_path):
    (tmp_path / "digit.png").write_bytes(picture(3, 72, 40))
    warned: list[str] = []
    gradio, model = SimpleNamespace(Warning=warned.append), ChatModel(talkative_hf_dir())
    history = [turn("user", QUESTION, str(tmp_path / "digit.png"))]
    *kept, answer = _reply(gradio, model, 9, history)
    assert kept == history and answer["role"] == "assistant"
    assert answer["content"] == ask(talkative_hf_dir(), tmp_path / "digit.png", QUESTION, max_new_tokens=9)

    assert _reply(gradio, model, 9, [*history, turn("assistant", "7")]) == [*history, turn("assistant", "7")]
    assert not warned, "nothing was asked"
    assert _reply(gradio, model, 9, [turn("user", QUESTION, str(tmp_path / "no.png"))]) == []
    box = {"text": "what <image> is", "files": []}
    assert _show(gradio, box, history) == [box, history]
    assert "no.png does not exist" in warned[0] and "holds &lt;image&gt;" in warned[1] and len(warned) == 2


def test_a_conversation_beyond_the_models_positions_is_refused(tmp_path):
    model, warned = ChatModel(talkative_hf_dir()), []
    _reply(SimpleNamespace(Warning=warned.append), model, 10**9, [turn("user", QUESTION)])
    assert "begin a new conversation" in warned[0]


def test_the_page_answers_whoever_knows_the_password(tmp_path):
    client = pytest.importorskip("gradio_client")
    pytest.importorskip("gradio")
    (tmp_path / "digit.png").write_bytes(picture(3, 72, 40))
    port, output, model = any_port("127.0.0.1"), tmp_path / "output.txt", str(talkative_hf_dir())
    command = ["-m", "flows.cli.main", "chat", model, model, "--port", str(port), "--max-tokens", "9"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command, "--root", str(tmp_path / "root")],
            stdout=file,
            stderr=file,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: "Ctrl-C" in output.read_text(), 240, "page", output.read_text)
        password = re.search(r"password (\S+)", output.read_text())[1]
        login = base64.b64encode(f"athanor:{password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}"}
        wait_for(lambda: _status(url) == 401, 240, "question for a password", output.read_text)
        assert _status(url, headers) == 200
        assert _status(url, headers | {"Origin": "http://evil.example"}) == 403
        assert _status(url, headers | {"Host": "evil.example"}) == 400

        page = client.Client(url, headers=headers, verbose=False, download_files=False)
        digit = client.handle_file(str(tmp_path / "digit.png"))
        _, *histories = page.predict({"text": QUESTION, "files": [digit]}, [], [], api_name="/ask")
        wanted = ask(talkative_hf_dir(), tmp_path / "digit.png", QUESTION, max_new_tokens=9)
        for number, history in enumerate(histories, 1):
            history[0]["content"][0]["file"] = digit
            *_, last = page.predict(history, api_name=f"/answer_{number}")
            assert last["content"][0]["text"] == wanted
        assert list(tmp_path.glob("athanor-chat-*/*"))
        process.send_signal(signal.SIGINT)
        assert process.wait(at_most(30)) == 0
        assert not list(tmp_path.glob("athanor-chat-*")), "the images are gone"
    finally:
        process.kill()
        process.wait()


def _status(url: str, headers: dict[str, str] | None = None) -> int:
    try:
        return httpx.get(url, headers=headers, timeout=at_most(30)).status_code
    except httpx.TransportError:
        return 0
