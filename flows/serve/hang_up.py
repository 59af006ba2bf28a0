"""Work for a client that ends when the client hangs up."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


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
