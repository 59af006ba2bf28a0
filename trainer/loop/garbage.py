"""Python's garbage collection, between steps and at the same ones on all ranks.

Left to itself it begins whenever enough objects were made, in the middle of a step, on each rank at another time, and
the other ranks wait for that one. What was there before the first step is not looked at again.
"""

import contextlib
import gc
from collections.abc import Iterator

INTERVAL = 50  # steps


@contextlib.contextmanager
def collected_by_steps() -> Iterator[None]:
    """Meanwhile garbage is collected by `collect_after` alone."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_after(step: int) -> None:
    """Collect garbage if it is time."""
    if step % INTERVAL == 0:
        gc.collect()
