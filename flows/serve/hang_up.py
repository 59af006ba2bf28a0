"""Clients that hang up, and clients that keep a connection without using it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

SILENT_SECONDS = 60.0


async def until_hang_up(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await the work. Cancel it if the client hangs up first; its `finally` blocks have run when this returns.

    Args:
        receive: of a request whose body was read.
    """
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(done, Exception):
        raise done


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClosingProtocol(H11Protocol):
    """A connection that is closed if its client does not send the whole head of a request, or reads nothing of an
    answer, for SILENT_SECONDS. uvicorn has no such limits. The answer ends as if the client had hung up.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first head."""
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a head, if one is not whole."""
        super().data_received(data)
        if self.flow.write_paused:
            return  # bytes of a client that reads nothing are no reason to wait longer
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self._start()

    def pause_writing(self) -> None:
        """Wait until the client reads: the buffers of its connection are full."""
        super().pause_writing()
        self._stop()
        self._start()

    def resume_writing(self) -> None:
        """Wait no more, since the client reads."""
        super().resume_writing()
        self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more, since the client has gone."""
        super().connection_lost(exc)
        self._stop()

    def _start(self) -> None:
        self._timer = self.loop.call_later(SILENT_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
