"""Connections whose client keeps silent: half a head, and an answer that nobody reads."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import uvicorn

from flows.serve import hang_up
from tests.helpers.patience import at_most

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)

ended = []


async def endless(scope, receive, send) -> None:
    """Answer every request without an end until the client is gone."""
    await receive()

    async def answer() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
            await asyncio.sleep(0)  # uvicorn does not wait if the client has gone

    await hang_up.until_hang_up(receive, answer())
    ended.append(scope["path"])


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(hang_up, "SILENT_SECONDS", 1.5)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(endless, http=hang_up.ClosingProtocol, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.force_exit = server.should_exit = True
    thread.join()


def test_half_a_head_is_not_waited_for(port):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=at_most(20)) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(b"GET / HTT")
        assert client.recv(1) == b""


@pytest.mark.parametrize("more", [b"", b"GET / HTT"])
def test_an_answer_that_nobody_reads_ends_and_one_that_is_read_does_not(port, more):
    ended.clear()
    with socket.create_connection(("127.0.0.1", port)) as still:
        still.sendall(b"GET /still HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.2)  # until the buffers of this connection are full
        still.sendall(more)
        with socket.create_connection(("127.0.0.1", port)) as reader:
            reader.sendall(b"GET /read HTTP/1.1\r\nHost: a\r\n\r\n")
            deadline = time.monotonic() + at_most(20)
            while "/still" not in ended and time.monotonic() < deadline:
                assert reader.recv(100_000)
    assert ended[0] == "/still"
