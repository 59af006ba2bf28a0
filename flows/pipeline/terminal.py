"""The standard output of a command: what is printed there may quote data, which must not steer the terminal.

    print(...)                      through `PrintableStream`, with escapes in place of control characters
    print(..., file=raw_stdout())   as it is: only for colours and bars of our own, around text that is `printable`

Errors go to the standard error by one function of `flows/cli/main.py`, and log records by its formatters.
"""

import sys
from typing import Any, TextIO

from dataset_builders.errors import printable


class PrintableStream:
    """A text stream that writes `printable` text to another one. All else is done by the other stream."""

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream

    def write(self, text: str) -> int:
        """Write the text with escapes; return the number of its characters."""
        self.raw_stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def raw_stdout() -> TextIO:
    """Return the standard output without escapes."""
    return getattr(sys.stdout, "raw_stream", sys.stdout)
