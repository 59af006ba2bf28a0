"""A model that answers by vLLM's own server: a program of its own on loopback, reached with a key of its own.

Requests are checked here first: vLLM fetches addresses of images, and reads special tokens in a person's text as such.
Tested only against a program with vLLM's interface, never with vLLM.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from dataset_builders.contracts.sample import IMAGE_SLOT, SkipSample
from dataset_builders.pictures.images import image_size
from dataset_builders.pictures.pixels import image_grid
from flows.prefect_server.ports import any_port
from flows.prefect_server.processes import begin_log, end_process, log_tail, start_process
from flows.serve.api_error import ApiError
from flows.serve.chat_request import Chat, unusable
from flows.service.supervisor import StartFailed
from stages.chat.conversation import check_conversation
from stages.chat.piece import Ending, Piece
from stages.encode.chat import ChatEncoder
from stages.encode.prompt import read_prompt_format

START_SECONDS = 900.0
_log = logging.getLogger("athanor.serve")
_HOST = "127.0.0.1"
_STOP_SECONDS = 10.0


def start_vllm(
    models: Sequence[tuple[str, Path]], rows: int, directory: Path, stack: contextlib.ExitStack
) -> list["VllmModel"]:
    """Start a server of vLLM for each (name, directory), one after the other, and wait until they answer.

    Args:
        rows: the maximal number of answers side by side.
        directory: of the logs.
        stack: ends the servers.

    Raises:
        StartFailed: a server ended or did not answer.
    """
    started = []
    for number, (name, hf_dir) in enumerate(models):
        model = VllmModel(name, hf_dir)
        log_path = directory / f"vllm-{number}.log"
        begin_log(log_path)
        process = start_process(
            command_of(name, hf_dir, model.port, rows, len(models)), {**os.environ, "VLLM_API_KEY": model.key}, log_path
        )
        stack.callback(end_process, process, _STOP_SECONDS)
        print(f"starting vLLM for {name}, log in {log_path}", flush=True)
        _wait(model, process, log_path)
        started.append(model)
    return started


def command_of(name: str, hf_dir: Path, port: int, rows: int, models: int) -> list[str]:
    """Return the command of vLLM's server. Several models share the first GPU, by equal shares of its memory."""
    return [
        *(shutil.which("vllm") or "vllm", "serve", str(hf_dir), "--served-model-name", name),
        *("--host", _HOST, "--port", str(port), "--max-num-seqs", str(rows)),
        *("--generation-config", "vllm"),  # its defaults, not the directory's sampling settings
        *("--gpu-memory-utilization", f"{0.9 / models:.2f}"),
    ]


def _wait(model: "VllmModel", process: subprocess.Popen, log_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not model.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = " / ".join(log_tail(log_path, 3))
            raise StartFailed(f"vLLM's server for {model.name} did not start; log: {log_path} ({tail})")
        time.sleep(0.2)


class VllmModel:
    """A model behind a server of vLLM. See `ServedModel`."""

    def __init__(self, name: str, hf_dir: Path) -> None:
        self.name = name
        self.port, self.key = any_port(_HOST), secrets.token_urlsafe(24)
        prompt = read_prompt_format(hf_dir)
        self._system_prompt, self._pixels = prompt.system_prompt, prompt.pixels
        self._chat = ChatEncoder(hf_dir, system_prompt=prompt.system_prompt)
        self._encoding = threading.Lock()  # a tokenizer is not thread-safe
        self._url = f"http://{_HOST}:{self.port}"

    def is_ready(self) -> bool:
        """Whether the server answers."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self._url}/health", trust_env=False).is_success
        return False

    def close(self) -> None:
        """Do nothing: the server ends with the command."""

    async def answer(self, chat: Chat) -> AsyncIterator[Piece]:
        """Yield the answer's pieces. See `ServedModel`."""
        try:
            await asyncio.to_thread(self._check, chat)
        except SkipSample as error:
            raise unusable(error, chat) from error
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            async with (
                httpx.AsyncClient(timeout=None, trust_env=False) as client,
                client.stream(
                    "POST", f"{self._url}/v1/chat/completions", json=self._body(chat), headers=headers
                ) as response,
            ):
                if response.is_client_error:
                    raise ApiError(400, _message(await response.aread()))
                async for piece in _pieces(response.raise_for_status().aiter_lines()):
                    yield piece
        except (httpx.HTTPError, ValueError) as error:
            _log.error("vLLM's answer of %s failed", self.name, exc_info=error)
            yield Piece(error=error)

    def _check(self, chat: Chat) -> None:
        """Raise SkipSample if the conversation cannot be asked."""
        check_conversation(chat.messages, chat.images)
        grids = [image_grid(*image_size(image), self._pixels) for image in chat.images]
        with self._encoding:
            self._chat.prompt_ids(chat.messages, grids)

    def _body(self, chat: Chat) -> dict[str, Any]:
        settings = chat.settings
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        if messages and chat.messages[0].role == "system":
            messages = []
        urls = iter(chat.image_urls)
        for message in chat.messages:
            parts: list[dict[str, Any]] = []
            for number, text in enumerate(message.text.split(IMAGE_SLOT)):
                parts += [{"type": "image_url", "image_url": {"url": next(urls)}}] if number else []
                parts += [{"type": "text", "text": text}] if text else []
            messages.append({"role": message.role, "content": parts if IMAGE_SLOT in message.text else message.text})
        return {
            "model": self.name,
            "messages": messages,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            "stop": list(settings.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def _pieces(lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
    """Yield the pieces of an event stream.

    Raises:
        ValueError: the stream has an error or ends early.
    """
    reason = None
    async for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ValueError(f"vLLM: {event['error']}")
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            if text := choice["delta"].get("content"):
                yield Piece(text)
        if (usage := event.get("usage")) and not event["choices"]:
            if reason not in ("stop", "length"):
                raise ValueError(f"vLLM ended an answer with {reason!r}")
            yield Piece(ending=Ending(reason, usage["prompt_tokens"], usage["completion_tokens"]))
            return
    raise ValueError("vLLM's stream ended early")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
