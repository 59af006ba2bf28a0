"""A process of its own for mutated inputs: `python -m tests.fuzz.MODULE KIND SEED COUNT DIRECTORY`.

Prints one JSON object: how many inputs ended in which way, and by how many bytes the process grew at most. An input
that takes over 10 s ends the process with its stack, wherever it hangs; so does one that raises what it must not.
"""

import faulthandler
import json
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

SECONDS = 10
MARGIN = 8 << 30  # bytes of address space: a bound for the machine's sake, what counts is the growth that is printed

Inputs = Callable[[str, random.Random, int, Path], Iterator[str]]


def run(inputs: Inputs, kind: str, seed: str, count: str, directory: str) -> None:
    """Run `count` inputs; `inputs` yields the name of what became of each."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MARGIN,) * 2)
    before = _peak()
    outcomes = Counter(_watched(inputs(kind, random.Random(f"{kind} {seed}"), int(count), Path(directory))))
    print(json.dumps({"outcomes": outcomes, "grown_bytes": _peak() - before}))


def _watched(outcomes: Iterator[str]) -> Iterator[str]:
    while True:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            yield next(outcomes)
        except StopIteration:
            return
        finally:
            faulthandler.cancel_dump_traceback_later()


def _peak() -> int:
    """Most bytes that this program ever held; ru_maxrss would count the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
