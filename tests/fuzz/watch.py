"""A limit of time and memory around mutated inputs, in a process of their own; see run_inputs.py.

Prints one JSON object: the number of inputs per outcome, and the largest growth of the process in bytes. An input that
takes more than 10 s ends the process with its stack, wherever it hangs. So does an input that raises a forbidden error.
"""

import faulthandler
import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SECONDS = 10
MARGIN = 8 << 30  # bytes of address space, a limit that protects the machine; the test uses the printed growth


def run(outcomes: Iterator[str], seconds: int = SECONDS) -> None:
    """Run the inputs of an iterator that yields the name of each input's outcome."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MARGIN,) * 2)
    before = _peak()
    counted = Counter(_watched(outcomes, seconds))
    print(json.dumps({"outcomes": counted, "grown_bytes": _peak() - before}))


def _watched(outcomes: Iterator[str], seconds: int) -> Iterator[str]:
    while True:
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            yield next(outcomes)
        except StopIteration:
            return
        finally:
            faulthandler.cancel_dump_traceback_later()


def _peak() -> int:
    """Return the largest number of bytes that this program held. ru_maxrss would include the process that
    started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
