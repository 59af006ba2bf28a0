"""A locked database makes a user who submits the form wait, but causes no error."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from flows.service import prefect_app


class Locked(Exception):
    """An error like the one that SQLite raises for a locked database."""


def client(refusals: int, seen: list[bytes]) -> TestClient:
    """Return a client of an application like Prefect's: its error handler answers 503, and starlette then raises the
    error again."""

    async def submit(request: Request) -> JSONResponse:
        seen.append(await request.body())
        if len(seen) <= refusals:
            raise Locked
        return JSONResponse({"number": len(seen)}, 201)

    async def busy(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"exception_message": "Service Unavailable"}, 503)

    app = Starlette(routes=[Route("/runs", submit, methods=["POST"])], exception_handlers={Exception: busy})
    return TestClient(prefect_app.asked_again(app), raise_server_exceptions=False)


@pytest.mark.parametrize("refusals", [0, 1, 4])
def test_a_refused_request_is_asked_again_with_its_body(refusals):
    seen: list[bytes] = []
    answer = client(refusals, seen).post("/runs", content=b"x" * 200_000)
    assert (answer.status_code, answer.json()) == (201, {"number": refusals + 1})
    assert seen == [b"x" * 200_000] * (refusals + 1)


def test_after_some_time_the_refusal_is_the_answer(monkeypatch):
    monkeypatch.setattr(prefect_app, "BUSY_SECONDS", 0.2)
    seen: list[bytes] = []
    answer = client(10**6, seen).post("/runs", content=b"x")
    assert answer.status_code == 503 and 2 <= len(seen) < 10


def test_another_error_is_answered_at_once():
    seen: list[bytes] = []
    answer = client(0, seen).get("/runs")
    assert answer.status_code == 405 and seen == []
