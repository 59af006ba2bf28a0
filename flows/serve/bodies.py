"""Bodies of requests, and the number of requests that are held in memory at a time."""

import contextlib
from collections.abc import Iterator

from starlette.requests import Request

from flows.serve.api_error import ApiError

MOST_BYTES = 20 * 2**20  # of a request's body


class Places:
    """A number of places, each for one request.

    Args:
        count: the maximal number of requests that are answered or wait at a time.
    """

    def __init__(self, count: int) -> None:
        self._count, self._held = count, 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Hold a place while the block lasts.

        Raises:
            ApiError: all places are held.
        """
        if self._held >= self._count:
            raise ApiError(
                429, f"{self._count} requests are answered or wait already; ask again later", code="rate_limit_exceeded"
            )
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: the body is too long; no more than the limit is kept in memory.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            limit = f"{MOST_BYTES // 2**20} MiB"
            raise ApiError(413, f"the body is longer than {limit}; send smaller images", code="request_too_large")
    return bytes(body)
