"""`uvicorn --factory flows.service.prefect_app:make_app`: Prefect's server behind the guard. The server checks
its own password.

Prefect answers 503 to a request whose transaction SQLite refused because another connection was writing. Prefect's
client then repeats the request, but Prefect's pages show the error to the user. Here the server repeats such a request
itself.
"""

import asyncio
import time

from prefect.server.api.server import create_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.service.guard import guarded

BUSY_SECONDS = 30.0  # after this time a 503 is sent to the client
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two tries
_BUSY = 503


def make_app() -> ASGIApp:
    """Return Prefect's API and pages, configured by the environment."""
    return guarded(asked_again(create_app()))


def asked_again(app: ASGIApp) -> ASGIApp:
    """Return an application that repeats a request answered with 503, until the answer differs or time is up.

    A refused transaction has changed nothing, so repeating it is safe.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        request, deadline, wait = await _whole(receive), time.monotonic() + BUSY_SECONDS, _FIRST_WAIT
        while await _is_busy(app, scope, _replayed(request, receive), send, is_last=time.monotonic() > deadline):
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    return answer


async def _is_busy(app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, is_last: bool) -> bool:
    """Pass the request to the application and return whether it answered 503. A 503 is sent only on the last try."""
    is_busy = False

    async def listen(message: Message) -> None:
        nonlocal is_busy
        is_busy |= message["type"] == "http.response.start" and message["status"] == _BUSY and not is_last
        if not is_busy:
            await send(message)

    try:
        await app(dict(scope), receive, listen)
    except Exception:  # starlette raises the error after it has sent the answer
        if not is_busy:
            raise
    return is_busy


async def _whole(receive: Receive) -> list[Message]:
    """Return the messages of a request's body."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    """Return a receive function that gives the request's messages again, and then the messages after them."""
    left = list(messages)

    async def replay() -> Message:
        return left.pop(0) if left else await receive()

    return replay
