"""The doors to the terminal, and tables for people. Printed text may quote data, which must not steer the terminal:

print(...)                      through `PrintableStream`, with escapes in place of control characters
print(..., file=raw_stdout())   as it is: only for colours and bars of our own, around text that is `printable`
logging                         through `PrintableLines` and `FirstLines`
errors                          `InputError` is printable, and `_say_error` of `flows/cli/main.py` prints all others
"""

import argparse
import logging
import sys
from collections.abc import Sequence
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


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], is_terminal: bool) -> None:
    """Print rows under their column heads, drawn by rich on a terminal. A column of numbers is aligned to the right."""
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    if is_terminal:
        from rich.console import Console  # not at the top, since `--help` has to be quick
        from rich.table import Table

        table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=True)
        for column, is_right in zip(columns, right):
            table.add_column(column, justify="right" if is_right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(printable, row))
        Console(file=raw_stdout(), markup=False).print(table)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows)]
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)]
        print(("  " + "  ".join(cells)).rstrip())


def bytes_text(number: float) -> str:
    """Return a number of bytes with three digits and its unit, for example 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "", 1).replace("-", "", 1).replace("%", "").isdigit() or cell == ""
