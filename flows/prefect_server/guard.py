"""What stands before a server: it lets in this machine's names, the server's own pages, and a password's owner.

- Host: another name is that of a foreign page whose address was made to be ours (DNS rebinding).
- Origin: a browser names the page that calls, also another port's of this machine. Only the server's own page may.
- Password: HTTP's Basic, for a server that asks for none by itself.

Its pages may ask the servers of this port alone: Prefect's ask a counter of visitors,
whatever its settings say.

Prefect's and MLflow's own checks of these let localhost's pages of any port through, or everybody.
"""

import base64
import hmac
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.prefect_server.access import NAMES_VARIABLE

HEALTH = "/health"  # says nothing but that the server runs


def guarded(app: ASGIApp, login: str | None = None, closed: frozenset[str] = frozenset()) -> ASGIApp:
    """The server behind its guard. The names are those of ATHANOR_HOST_NAMES, without which nobody gets in.

    Args:
        login: `user:password`; None if the server asks by itself.
        closed: parts of a path below which nothing answers.
    """
    names = os.environ.get(NAMES_VARIABLE, "").split(",")
    expected = base64.b64encode(login.encode()) if login else None
    return TrustedHostMiddleware(_Guard(app, frozenset(names), expected, closed), names, www_redirect=False)


@dataclass(frozen=True, slots=True)
class _Guard:
    app: ASGIApp
    names: frozenset[str]
    expected: bytes | None
    closed: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("X-Frame-Options", "SAMEORIGIN")
                headers.setdefault("Content-Security-Policy", f"connect-src 'self' {self._sources(scope)}")
            await send(message)

        answer = self._refusal(scope, Headers(scope=scope)) or self.app
        await answer(scope, receive, send_unframed)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if not all(self._is_own(origin, scope, headers) for origin in headers.getlist("origin")):
            return PlainTextResponse("refused: a page of another origin calls\n", 403)
        if self.expected is None or scope["path"] == HEALTH or self._knows_it(headers):
            is_closed = not self.closed.isdisjoint(scope["path"].split("/"))
            return PlainTextResponse("athanor keeps this closed\n", 404) if is_closed else None
        how = {"WWW-Authenticate": 'Basic realm="athanor: user and password as `athanor up` says", charset="UTF-8"'}
        return PlainTextResponse("refused: user and password, as `athanor up` says, are missing or wrong\n", 401, how)

    def _is_own(self, origin: str, scope: Scope, headers: Headers) -> bool:
        """Whether a page is the server's: the address that it calls, or another of this machine's names for it."""
        try:
            page = urlsplit(origin)
            host, _, port = page.netloc.rpartition(":")
            is_named = host.lower() in self.names and port == str(scope["server"][1])
        except ValueError:
            return False
        return page.scheme in ("http", "https") and (page.netloc == headers.get("host") or is_named)

    def _sources(self, scope: Scope) -> str:
        """The API's addresses, of which a page may be another name of this machine's; `ws:` stands for `http:` too."""
        api = urlsplit(os.environ.get("PREFECT_UI_API_URL", "")).netloc
        return " ".join(f"ws://{place}" for place in (f"*:{scope['server'][1]}", api) if place)

    def _knows_it(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "basic" and hmac.compare_digest(given.strip().encode(), self.expected)
