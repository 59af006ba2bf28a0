"""A model's chat template: an untrusted program, rendered in a separate process that it may crash.

transformers' sandbox keeps a template from files and network, but not from an endless loop or a string of gigabytes. So
no template is rendered in our own processes. The rendering process (`template_process.py`) limits CPU seconds and
characters for each conversation, and its memory. It calls transformers' own function.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, one_line
from stages.shared.inputs.model_directory import ModelDirectory, read_json

CPU_SECONDS = 5  # per conversation; a conversation of a megabyte takes 0.02 s with Qwen's template
MEMORY = 1 << 30  # bytes, in addition to the memory of the process at its start
REASONING = "reasoning_content"  # field of a message, with the name that templates use
CHARACTERS, CHARACTERS_PER_GIVEN = 100_000, 10  # output limit: a constant, plus 10 characters for each input character

_PROGRAM = Path(__file__).with_name("template_process.py")
_REQUEST_CHARACTERS = 1 << 22  # characters of the conversations in one request
_MAX_DEATHS = 3  # conversations that may end the process; more are the template's fault, and each costs CPU_SECONDS
_WAY_OUT = "copy the chat_template.jinja of the model's makers"
TRIAL_PAIRS = (("What is it?", "A seven."), ("And now?", "Still a seven."), ("Is it odd?", "Yes."))
_PICTURE_TRIAL: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": "A seven."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still a seven."},
]

Messages = list[dict[str, Any]]  # one conversation, in the form of transformers' apply_chat_template


class ChatTemplate:
    """Renderer of conversations with one template. `owner` is the model's directory, for messages."""

    def __init__(self, owner: str, template: str, variables: Mapping[str, Any]) -> None:
        self._owner = owner
        self._settings = {
            "template": template,
            "variables": dict(variables),
            "cpu_seconds": CPU_SECONDS,
            "memory": MEMORY,
            "characters": CHARACTERS,
            "characters_per_given": CHARACTERS_PER_GIVEN,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._deaths = 0

    def check(self, has_images: bool) -> None:
        """Render small conversations, one of them with an image if `has_images`. InputError: the template exceeds a
        limit, fails, refuses a plain question, or writes other text before an answer than in the answer's prompt."""
        for number, trial in enumerate([_turns(1)[:1], _PICTURE_TRIAL][: 1 + has_images]):
            ((kind, text),) = self._outcomes([_request(trial, number == 0, thinks=False)])
            if kind == "failed" or (kind == "refused" and number == 0):
                what = f"refuses a plain question ({text})" if kind == "refused" else text
                raise InputError(f"{self._owner}: the chat template {what}; {_WAY_OUT}")
        for begin in ([], [{"role": "system", "content": "Be brief."}]):
            for num_turns in range(1, len(TRIAL_PAIRS) + 1):
                self._check_prompt([*begin, *_turns(num_turns)], num_turns)

    def _check_prompt(self, messages: Messages, num_turns: int) -> None:
        """Check that a conversation's text begins with the prompt of its last answer. A refused conversation passes."""
        requests = [_request(messages, False, False), _request(messages[:-1], True, False)]
        (text_kind, text), (prompt_kind, prompt) = self._outcomes(requests)
        if (text_kind, prompt_kind) != ("text", "text") or text.startswith(prompt):
            return
        place = next((i for i, (a, b) in enumerate(zip(text, prompt)) if a != b), min(len(text), len(prompt)))
        found, expected = (repr(one[max(0, place - 10) : place + 30]) for one in (text, prompt))
        about = f"{num_turns} turn{'s' * (num_turns > 1)}{' and a system message' * (messages[0]['role'] == 'system')}"
        raise InputError(
            f"{self._owner}: with {about} the chat template writes {found} before the last answer where its prompt at "
            f"inference has {expected}, so training would not match inference; {_WAY_OUT}"
        )

    def render(
        self, conversations: Sequence[Messages], add_generation_prompt: bool = False, thinks: bool | None = None
    ) -> list[str | SkipSample]:
        """Return the text of each conversation, or the reason why there is none.

        `thinks`: whether reasoning is requested before the last answer (`enable_thinking`); None: only if a
        conversation's last message has reasoning.
        """
        texts: list[str | SkipSample] = []
        requests = [
            _request(
                messages,
                add_generation_prompt,
                bool(messages and messages[-1].get(REASONING)) if thinks is None else thinks,
            )
            for messages in conversations
        ]
        for part in _parts(requests):
            for kind, text in self._outcomes(part):
                why = f"refuses the conversation: {text}" if kind == "refused" else text
                skip = SkipSample("mask_span_mismatch", f"the chat template {why}")
                texts.append(text if kind == "text" else skip)
        return texts

    def _outcomes(self, requests: Sequence[str]) -> list[tuple[str, str]]:
        """Return (kind, text) of each request, from the process."""
        data = f"[{','.join(requests)}]\n".encode("utf-8", "surrogatepass")
        for _ in range(2):  # two tries: the machine may also end a process, for lack of memory
            with self._lock:
                line, status = self._exchange(data)
            if line:
                return [(kind, text) for kind, text in json.loads(line)]
            if len(requests) > 1:  # find the conversation that ended the process
                return [outcome for request in requests for outcome in self._outcomes([request])]
            if status == -signal.SIGPROF:
                break
        self._deaths += 1
        why = f"needs over {CPU_SECONDS} s of CPU" if status == -signal.SIGPROF else f"ends its process ({status})"
        why += f" for a conversation of {len(requests[0]):,} characters"
        if self._deaths > _MAX_DEATHS:
            raise InputError(f"{self._owner}: the chat template {why}, like {_MAX_DEATHS} others before; {_WAY_OUT}")
        return [("failed", why)]

    def _exchange(self, request: bytes) -> tuple[bytes, int]:
        """Return the process's answer and 0; if the process ended instead, nothing and its exit status."""
        process = self._process = self._process or self._start()
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return line, 0
        self._process = None
        return b"", process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: nothing is imported from the program's folder.
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, process)
        process.stdin.write(json.dumps(self._settings, default=str).encode() + b"\n")
        return process


def chat_template(model: ModelDirectory, template: str, variables: Mapping[str, Any]) -> ChatTemplate:
    """Return the checked template of a model directory; this process caches the last two."""
    settings = json.dumps(dict(variables), default=str, sort_keys=True)
    # By process, since a forked child must not write into the pipe of its parent.
    return _checked(os.getpid(), str(model.path), template, settings, model.shape.images is not None)


def check_template(model: ModelDirectory) -> None:
    """Check that the template of a model directory keeps the limits, before a tokenizer is loaded."""
    template, tokens = read_template(model.path)
    if template is not None:
        chat_template(model, template, tokens)


@functools.lru_cache(maxsize=2)
def _checked(pid: int, owner: str, template: str, variables: str, has_images: bool) -> ChatTemplate:
    chat = ChatTemplate(owner, template, json.loads(variables))
    chat.check(has_images)
    return chat


def read_template(hf_dir: Path) -> tuple[str | None, dict[str, Any]]:
    """Return a model directory's template and special tokens, only from its files; None if no template is a text."""
    file, settings = hf_dir / "chat_template.jinja", hf_dir / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    tokens = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    try:
        template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({one_line(error)}); {_WAY_OUT}") from error
    if template is None and (legacy := hf_dir / "chat_template.json").is_file():
        template = read_json(legacy).get("chat_template")
    return template if isinstance(template, str) else None, tokens


def _turns(number: int) -> Messages:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in TRIAL_PAIRS[:number] for role, text in zip(roles, pair)]


def _request(messages: Messages, add_generation_prompt: bool, thinks: bool) -> str:
    text = json.dumps(messages, ensure_ascii=False)
    return f"[{text}, {'true' if add_generation_prompt else 'false'}, {'true' if thinks else 'false'}, {len(text)}]"


def _parts(requests: Sequence[str]) -> list[list[str]]:
    """Return the requests in order, in lists of some megabytes."""
    parts: list[list[str]] = []
    size = _REQUEST_CHARACTERS
    for request in requests:
        if size >= _REQUEST_CHARACTERS:
            parts.append([])
            size = 0
        parts[-1].append(request)
        size += len(request)
    return parts


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
