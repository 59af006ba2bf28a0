"""Inputs with forbidden effects: `python -m tests.fuzz.naughty raises|hangs|grows ...` shows that the watch detects
them."""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import watch


def naughty(kind: str, rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    if kind == "raises":
        raise KeyError("naughty")
    if kind == "hangs":
        time.sleep(5)
    if kind == "grows":
        yield str(len(b"x" * (300 << 20)))
    yield "sample"


if __name__ == "__main__":
    watch.SECONDS = 1 if sys.argv[1] == "hangs" else 10
    watch.run(naughty, *sys.argv[1:])
