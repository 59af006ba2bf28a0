"""`uvicorn --factory flows.prefect_server.prefect_app:make_app`: Prefect's server, which asks for its own password,
behind the guard.

Prefect answers 503 to a request whose transaction SQLite refused: another connection wrote meanwhile. Prefect's own
client then asks again, but its pages show the error to a person. Here the server asks itself again.
"""

import asyncio
import time

from prefect.server.api.server import create_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.prefect_server.guard import guarded

BUSY_SECONDS = 30.0  # after which a 503 is the answer
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two tries
_BUSY = 503


def make_app() -> ASGIApp:
    """Prefect's API and pages, as the environment sets them."""
    return guarded(asked_again(create_app()))


def asked_again(app: ASGIApp) -> ASGIApp:
    """An application whose answer 503 makes it get the same request again, until it answers otherwise or time is up.

    A refused transaction has changed nothing, so that a request counts once.
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
    """Whether the application answered 503, which is then not sent, unless it is the last try."""
    is_busy = False

    async def listen(message: Message) -> None:
        nonlocal is_busy
        is_busy |= message["type"] == "http.response.start" and message["status"] == _BUSY and not is_last
        if not is_busy:
            await send(message)

    try:
        await app(dict(scope), receive, listen)
    except Exception:  # starlette raises the error again after the answer
        if not is_busy:
            raise
    return is_busy


async def _whole(receive: Receive) -> list[Message]:
    """The messages of a request's body."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    """A request's messages once more; then whatever comes after them."""
    left = list(messages)

    async def replay() -> Message:
        return left.pop(0) if left else await receive()

    return replay
