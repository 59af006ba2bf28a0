"""Bodies of requests, and the number of requests that are held in memory at a time."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.requests import Request

from flows.serve.api_error import ApiError

MOST_BYTES = 20 * 2**20  # of a request's body
_SMALL_BYTES = 2**16  # a body that is not longer holds no place before it is whole
BODY_SECONDS = 60.0  # for a whole body


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


async def read_body(request: Request, hold: Callable[[], object]) -> bytes:
    """Return the body of a request.

    Args:
        hold: takes a place. It is called once, for a small body at its end. So slow clients keep nobody out.

    Raises:
        ApiError: the body is too long or too slow, or there is no place; no more than the limit is kept in memory.
    """
    body, is_held = bytearray(), False
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    limit = f"{MOST_BYTES // 2**20} MiB"
                    raise ApiError(
                        413, f"the body is longer than {limit}; send smaller images", code="request_too_large"
                    )
                if len(body) > _SMALL_BYTES and not is_held:
                    hold()
                    is_held = True
    except TimeoutError:
        late = f"the body was not whole after {BODY_SECONDS:.0f} s"
        raise ApiError(408, f"{late}; send smaller images, or use a faster connection") from None
    if not is_held:
        hold()
    return bytes(body)
