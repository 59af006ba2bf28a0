"""`athanor ask MODEL PICTURE "question"`: an exported model answers; an image or a video is read as in training.
`athanor chat MODEL [MODEL2]`: a page on this machine to ask one model about images, or two beside each other.

Gradio draws the page. It listens on loopback only, behind the guard of `athanor up` with a password of its own. Answers
are those of `athanor ask`, and the page shows them as text: an answer's Markdown could name images of other servers.
"""

import argparse
import contextlib
import html
import importlib
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dataset_builders.contracts.sample import Message
from dataset_builders.errors import InputError
from flows.service.access import USER
from stages.answer.ask import ChatModel, ask, user_message
from stages.shared.inputs.model_directory import resolve_hf_dir

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")  # a request to another name comes from a foreign page (DNS rebinding)
_LARGEST_FILE = "20mb"


def ask_command(args: argparse.Namespace) -> int:
    """Print the model's answer."""
    picture = None if args.picture == Path("-") else args.picture
    print(ask(resolve_hf_dir(args.model), picture, args.question, adapter_dir=args.adapter))
    return 0


def chat_command(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Uploaded images lie in a directory that is deleted at the end."""
    import fastapi  # not at the top, since `ask` needs no server
    import uvicorn

    from flows.service.guard import guarded

    models: dict[str, ChatModel] = {}
    for number, model in enumerate(args.models):
        adapter = args.adapter if number == len(args.models) - 1 else None
        name = f"{number + 1}: {model}" + (f" + {adapter}" if adapter else "")
        models[name] = ChatModel(resolve_hf_dir(model), adapter)
    with tempfile.TemporaryDirectory(prefix="athanor-chat-") as files:
        os.environ |= {"GRADIO_TEMP_DIR": files, "GRADIO_ANALYTICS_ENABLED": "False"}  # read when gradio is imported
        gradio = importlib.import_module("gradio")
        page = make_page(gradio, models, args.max_tokens)
        app = gradio.mount_gradio_app(
            fastapi.FastAPI(), page, "/", max_file_size=_LARGEST_FILE, ssr_mode=False, footer_links=[]
        )
        password = secrets.token_urlsafe(24)
        print(f"http://{HOST}:{args.port}  user {USER}, password {password}  (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server = guarded(app, f"{USER}:{password}", names=_NAMES)
            uvicorn.run(server, host=HOST, port=args.port, log_level="warning")
    return 0


def make_page(gradio: Any, models: Mapping[str, ChatModel], max_new_tokens: int) -> Any:
    """Return Gradio's page: a conversation per model, and one box whose question and images go to all of them."""
    with gradio.Blocks(title="athanor chat", analytics_enabled=False, fill_height=True, fill_width=True) as page:
        with gradio.Row(scale=1):
            chats = [
                gradio.Chatbot(label=name, height="75vh", render_markdown=False, buttons=["copy"], allow_tags=True)
                for name in models
            ]
        box = gradio.MultimodalTextbox(
            file_types=["image"],
            file_count="multiple",
            placeholder="A question, with or without images",
            show_label=False,
        )
        step = box.submit(partial(_show, gradio), [box, *chats], [box, *chats], api_name="ask")
        for number, (model, chat) in enumerate(zip(models.values(), chats), 1):
            # One at a time, whoever asks: two batches at once would share the memory of one GPU.
            step = step.then(
                partial(_reply, gradio, model, max_new_tokens),
                inputs=chat,
                outputs=chat,
                api_name=f"answer_{number}",
                concurrency_id="models",
                concurrency_limit=1,
            )
        step.then(lambda: gradio.MultimodalTextbox(interactive=True), None, box, api_visibility="private")
        gradio.ClearButton([box, *chats], value="New conversation")
    return page


def conversation_of(history: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[Path]]:
    """Return the messages of a chatbot's history, and the image files that they show, in order.

    Raises:
        InputError: a question cannot be asked.
    """
    messages: list[Message] = []
    pictures: list[Path] = []
    for turn in history:
        text = "\n".join(part["text"] for part in turn["content"] if part["type"] == "text")
        files = [Path(part["file"]["path"]) for part in turn["content"] if part["type"] == "file"]
        is_question = turn["role"] == "user"
        messages.append(user_message(text, len(files)) if is_question else Message(role="assistant", text=text))
        pictures += files
    return messages, pictures


def _show(gradio: Any, asked: Mapping[str, Any], *histories: list[dict[str, Any]]) -> list[Any]:
    """Return an empty box that is closed until all have answered, and each history with the question at its end; all
    unchanged if it cannot be asked."""
    try:
        user_message(asked["text"], len(asked["files"]))
    except InputError as error:
        gradio.Warning(html.escape(str(error)))  # an error would cover the conversations
        return [asked, *histories]
    turn = {"role": "user", "content": [*({"path": path} for path in asked["files"]), asked["text"]]}
    return [gradio.MultimodalTextbox(value=None, interactive=False), *([*history, turn] for history in histories)]


def _reply(gradio: Any, model: ChatModel, max_new_tokens: int, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the history with the model's answer; without the question if it cannot be answered."""
    if not history or history[-1]["role"] != "user":
        return history
    try:
        answer = model.answer(*conversation_of(history), max_new_tokens)
    except InputError as error:
        gradio.Warning(html.escape(str(error)))
        return history[:-1]
    return [*history, {"role": "assistant", "content": answer}]
