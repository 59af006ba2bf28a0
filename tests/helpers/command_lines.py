"""What `ps` shows to everybody on a machine, collected while something runs."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY = 0.05  # seconds; torchrun, ranks, servers and workers all live longer


@contextlib.contextmanager
def seen_command_lines() -> Iterator[set[bytes]]:
    """The command lines of all processes that there are meanwhile."""
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
