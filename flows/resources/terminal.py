"""The doors to the terminal: what is printed may quote data, which must not steer the terminal.

print(...)                      through `PrintableStream`, with escapes in place of control characters
print(..., file=raw_stdout())   as it is: only for colours and bars of our own, around text that is `printable`
logging                         through `PrintableLines` and `FirstLines`
errors                          `InputError` is printable, and `_say_error` of `flows/cli/main.py` prints all others
"""

import argparse
import logging
import sys
from typing import Any, NoReturn, TextIO

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


class PrintableLines(logging.Formatter):
    """Format log records for a file that is shown on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class FirstLines(logging.Formatter):
    """Format log records for the terminal, without the traceback, which is in the log file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(f"{record.levelname.lower()}: {record.getMessage().splitlines()[0]}")


class PrintableParser(argparse.ArgumentParser):
    """A parser whose errors quote arguments in printable form."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))
