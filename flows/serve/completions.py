"""POST /v1/chat/completions, streamed and not."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from flows.serve.api_error import ApiError, field_error, parse_json
from flows.serve.bodies import Places, read_body
from flows.serve.chat_request import Chat, parse_chat
from flows.serve.hang_up import until_hang_up
from flows.serve.served_model import ServedModel
from stages.chat.piece import Ending, Piece

_FAILED = "the answer failed; the server's output has the reason"
_STOPPED = ApiError(503, "the server was stopped before the answer's end; ask again when it runs")


class Completions:
    """The endpoint.

    Args:
        models: by name.
        places: one is held from a request's last byte, or the first of a long one, to its answer's last.
        most_tokens: the limit of an answer's length.
    """

    def __init__(self, models: Mapping[str, ServedModel], places: Places, most_tokens: int) -> None:
        self._models, self._places, self._most_tokens = models, places, most_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, unless its client hangs up."""
        is_begun = False

        async def noted(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            with contextlib.ExitStack() as stack, contextlib.suppress(ClientDisconnect):
                body = await read_body(Request(scope, receive), lambda: stack.enter_context(self._places.one()))
                chat = parse_chat(parse_json(body), self._most_tokens)
                await until_hang_up(receive, self._answer(chat, scope, receive, noted))
        except ApiError as error:
            await error.response()(scope, receive, send)
        except asyncio.CancelledError:  # by uvicorn, when the server is stopped
            if is_begun:
                await _send(send, _STOPPED.body(), is_last=True)
            else:
                await _STOPPED.response()(scope, receive, send)

    async def _answer(self, chat: Chat, scope: Scope, receive: Receive, send: Send) -> None:
        if (model := self._models.get(chat.model)) is None:
            raise no_such_model(chat.model, self._models)
        async with contextlib.aclosing(model.answer(chat)) as pieces:
            first = await anext(pieces)  # an error before the answer has a status of its own
            if first.error:
                raise ApiError(500, _FAILED) from first.error
            reply = _Reply(chat)
            if chat.is_streamed:
                await reply.stream(first, pieces, send)
            else:
                await JSONResponse(await reply.whole(first, pieces))(scope, receive, send)


def no_such_model(name: str, models: Mapping[str, ServedModel]) -> ApiError:
    """Return the error of a name that no model has."""
    error = field_error("model", f"{name!r} is not served here; {', '.join(models)}", "model_not_found")
    error.status = 404
    return error


class _Reply:
    """One answer in OpenAI's form."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": chat.model}

    async def whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        text, piece = first.text, first
        async for piece in pieces:
            text += piece.text
        if piece.error:
            raise ApiError(500, _FAILED) from piece.error
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": piece.ending.reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": _usage(piece.ending)}

    async def stream(self, first: Piece, pieces: AsyncIterator[Piece], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self._chunk({"role": "assistant", "content": ""}))
        piece = first
        while True:
            if piece.text:
                await _send(send, self._chunk({"content": piece.text}))
            if piece.is_last:
                break
            piece = await anext(pieces)
        if piece.error:
            await _send(send, ApiError(500, _FAILED).body())
        else:
            await _send(send, self._chunk({}, piece.ending.reason))
            if self._chat.has_usage:
                await _send(send, {**self._chunk({}), "choices": [], "usage": _usage(piece.ending)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


async def _send(send: Send, value: dict[str, Any], is_last: bool = False) -> None:
    body = f"data: {json.dumps(value)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _usage(ending: Ending) -> dict[str, int]:
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.completion_tokens,
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
    }
