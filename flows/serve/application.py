"""The web application of the served models, behind the guard.

GET  /                        the page
GET  /v1/models[/NAME]        POST /v1/chat/completions
POST /votes                   GET  /health
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from flows.prefect_server.guard import HEALTH, guarded
from flows.serve.api_error import ApiError, parse_json
from flows.serve.bodies import Places, read_body
from flows.serve.completions import Completions, no_such_model
from flows.serve.served_model import ServedModel
from flows.serve.votes import Votes

_PAGE = Path(__file__).parent / "page"
_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
# The page loads its own files only, and shows images that its user chose.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(
    models: Sequence[ServedModel], votes: Votes, places: int, most_tokens: int, login: str, names: Sequence[str]
) -> ASGIApp:
    """Return the application.

    Args:
        places: the maximal number of requests that are answered or wait at a time.
        most_tokens: the limit of an answer's length.
        login: `user:password`; the password is also the API key.
        names: host names that a request may call.
    """
    by_name = {model.name: model for model in models}
    service = _Service(by_name, votes, Places(places))
    routes = [
        *(Route(path, service.page) for path in _FILES),
        Route(HEALTH, lambda request: PlainTextResponse("ok\n")),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/chat/completions", Completions(by_name, service.places, most_tokens), methods=["POST"]),
        Route("/votes", service.vote, methods=["POST"]),
    ]

    @contextlib.asynccontextmanager
    async def closing(_: Starlette) -> AsyncIterator[None]:
        yield
        for model in models:
            await asyncio.to_thread(model.close)

    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=closing)
    return guarded(app, login, names=names, takes_key=True, refuse=_refuse)


class _Service:
    """The endpoints beside the chat."""

    def __init__(self, models: Mapping[str, ServedModel], votes: Votes, places: Places) -> None:
        self._models, self._votes, self.places = models, votes, places
        self._started = int(time.time())

    async def page(self, request: Request) -> Response:
        """Return a file of the page."""
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        return FileResponse(_PAGE / _FILES[request.url.path], headers=headers)

    async def models(self, request: Request) -> Response:
        """Return the names of the models."""
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._models]})

    async def model(self, request: Request) -> Response:
        """Return one model."""
        if (name := request.path_params["name"]) not in self._models:
            raise no_such_model(name, self._models)
        return JSONResponse(self._described(name))

    async def vote(self, request: Request) -> Response:
        """Store a vote."""
        with contextlib.ExitStack() as stack:
            values = parse_json(await read_body(request, lambda: stack.enter_context(self.places.one())))
            await asyncio.to_thread(self._votes.add, values)
        return JSONResponse({"stored": True})

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "athanor"}


def _refuse(message: str, status: int, headers: dict[str, str] | None) -> Response:
    response = ApiError(status, message).response()
    response.headers.update(headers or {})
    return response


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = f"{request.method} {request.url.path}: {error.detail}"
    has = "" if error.status_code != 404 else "; programs are served at /v1/models and /v1/chat/completions"
    return ApiError(error.status_code, path + has).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, "the request failed; the server's output has the reason").response()
