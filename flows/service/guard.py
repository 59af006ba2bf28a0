"""The guard in front of a server, which checks the host name, the origin and the password of every request.

- Host: only this machine's names are let in. A request to another name comes from a foreign page whose address was
  pointed at this machine (DNS rebinding).
- Origin: a browser names the page that sends a request. Only the server's own pages are let in; pages of other ports of
  this machine are not.
- Password: HTTP Basic authentication, for a server that has no password check of its own.

The server's pages may connect only to the servers of this port, because Prefect's pages call a visitor counter whatever
the settings are. The guard replaces the checks of Prefect and MLflow, which let in localhost's pages of any port, or
everybody.
"""

import base64
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.tracking.servers import NAMES_VARIABLE

LOG_IN = (
    "Log in with the user and password that athanor named at its start; athanor up keeps those that it made in "
    "service/password below its root, as user:password."
)
HEALTH = "/health"  # needs no password, since it shows only that the server is running


def guarded(
    app: ASGIApp,
    login: str | None = None,
    closed: frozenset[str] = frozenset(),
    names: Sequence[str] | None = None,
) -> ASGIApp:
    """Return the server behind its guard.

    Args:
        login: `user:password`; None if the server checks a password itself.
        closed: path segments; a path with one of them is answered with 404.
        names: the allowed host names; None: those of ATHANOR_HOST_NAMES. Without any, every request is refused.
    """
    names = os.environ.get(NAMES_VARIABLE, "").split(",") if names is None else list(names)
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
        how = {"WWW-Authenticate": 'Basic realm="athanor: user and password as its start printed", charset="UTF-8"'}
        return PlainTextResponse(LOG_IN + "\n", 401, how)

    def _is_own(self, origin: str, scope: Scope, headers: Headers) -> bool:
        """Whether a page belongs to the server: its address is the called one, or another of the server's names."""
        try:
            page = urlsplit(origin)
            host, _, port = page.netloc.rpartition(":")
            is_named = host.lower() in self.names and port == str(scope["server"][1])
        except ValueError:
            return False
        return page.scheme in ("http", "https") and (page.netloc == headers.get("host") or is_named)

    def _sources(self, scope: Scope) -> str:
        """Return the addresses that a page may connect to: this port under any name, and the API's address.

        In a Content-Security-Policy, `ws:` allows `http:` too.
        """
        api = urlsplit(os.environ.get("PREFECT_UI_API_URL", "")).netloc
        return " ".join(f"ws://{place}" for place in (f"*:{scope['server'][1]}", api) if place)

    def _knows_it(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "basic" and hmac.compare_digest(given.strip().encode(), self.expected)
