"""`uvicorn --factory flows.service.prefect_app:make_app`: Prefect's server behind the guard. The server checks
its own password.

Prefect answers 503 to a request whose transaction SQLite refused because another connection was writing. Prefect's
client then repeats the request, but Prefect's pages show the error to the user. Here the server repeats such a request
itself.

Prefect's pages are given a script where the server has a password: see `_FIRST_VISIT`.
"""

import asyncio
import json
import os
import time

from prefect.server.api.server import create_app
from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.service.guard import LOG_IN, guarded
from flows.tracking.servers import PREFECT_SECRET

BUSY_SECONDS = 30.0  # after this time a 503 is sent to the client
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two tries
_BUSY = 503
_OF_CACHES = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")
# Without a password, Prefect's pages begin with errors and an advertisement for Prefect Cloud, and ask for a login
# without a word on which. Here they begin with the login and where it is found. The page's own box for a run's name,
# whose text is random and not kept, is hidden, since the form has one. The older pages do not find the setting
# PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT and read the browser's storage, which also hides an advertisement for the
# newer pages. A box grows with its lines.
_FIRST_VISIT = """<head><style>
.p-label:has(> .p-label__body > .flow-run-name-input), .p-label:has(.flow-run-name-input) + .p-divider {
  display: none;
}
.schema-form-property textarea { field-sizing: content; }
</style><script>
const fixed = { "prefect-show-promotional-content": "false", "prefect-v2-promo-dismissed": "true" };
const stored = Storage.prototype.getItem;
Storage.prototype.getItem = function (key) { return fixed[key] ?? stored.call(this, key); };
const path = location.pathname;
if (!/^\\/(v2|login)/.test(path) && !localStorage.getItem("prefect-password")) {
  history.replaceState(null, "", "/login?redirect=" + encodeURIComponent(path + location.search));
}
new MutationObserver(() => {
  if (!location.pathname.endsWith("/login")) return;
  for (const toast of document.querySelectorAll(".p-toast-container__toast")) {
    if (toast.textContent.includes("Something went wrong")) toast.querySelector("button").click();
  }
  const box = document.querySelector('input[placeholder="admin:pass"]');
  if (!box) return;
  box.placeholder = "user:password";
  const hint = document.createElement("p");
  hint.textContent = LOG_IN;
  hint.style.marginBottom = "1rem";
  box.form.before(hint);
}).observe(document, { childList: true, subtree: true });
</script>""".replace("LOG_IN", json.dumps(LOG_IN))


def make_app() -> ASGIApp:
    """Return Prefect's API and pages, configured by the environment."""
    app = asked_again(create_app())
    return guarded(with_first_visit(app) if os.environ.get(PREFECT_SECRET) else app)


def with_first_visit(app: ASGIApp) -> ASGIApp:
    """Return an application whose pages have the script of _FIRST_VISIT."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or b"text/html" not in dict(scope["headers"]).get(b"accept", b""):
            return await app(scope, receive, send)
        parts: list[Message] = []

        async def keep(message: Message) -> None:
            parts.append(message)

        # The whole page, not packed, even if the browser has it: with another script, perhaps.
        asked = [(name, value) for name, value in scope["headers"] if name not in _OF_CACHES]
        await app({**scope, "headers": asked}, receive, keep)
        if MutableHeaders(scope=parts[0]).get("content-type", "").startswith("text/html"):
            page = b"".join(part.get("body", b"") for part in parts).decode()
            await HTMLResponse(page.replace("<head>", _FIRST_VISIT, 1))(scope, receive, send)
        else:
            for part in parts:
                await send(part)

    return answer


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
