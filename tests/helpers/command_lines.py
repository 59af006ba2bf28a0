"""The command lines that `ps` shows to every user of a machine, collected while something runs."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY = 0.05  # seconds; torchrun, ranks, servers and workers all run longer


@contextlib.contextmanager
def seen_command_lines() -> Iterator[set[bytes]]:
    """Collect the command lines of all processes while the block lasts."""
    seen: set[bytes] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())
            ended.wait(EVERY)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
