"""One line a part of the service: updated in place on a terminal, printed at each change elsewhere."""

import sys
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_COLOURS = {"ready": "green", "starting": "yellow", "waiting": "yellow", "stopping": "yellow", "stopped": "dim"}


@dataclass(frozen=True, slots=True)
class Line:
    """State of a part, and what is to be known about it: an address, a reason."""

    state: str
    about: str = ""


class StatusLines(Protocol):
    """Shows the lines."""

    def show(self, part: str, state: str, about: str = "") -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class PrintedLines:
    """For a file or a pipe."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def show(self, part: str, state: str, about: str = "") -> None:
        line = Line(state, about)
        if self._lines.get(part) != line:
            self._lines[part] = line
            self.say(f"{part:<12} {state:<10} {about}".rstrip())

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class LiveLines:
    """For a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._lines: dict[str, Line] = {}
        self._live = Live(console=console or Console(), auto_refresh=False, transient=False)
        self._live.start()

    def show(self, part: str, state: str, about: str = "") -> None:
        line = Line(state, about)
        if self._lines.get(part) != line:
            self._lines[part] = line
            self._live.update(self._table(), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, line in self._lines.items():
            colour = _COLOURS.get(line.state, "red")
            table.add_row(part, Text(line.state, colour), Text(line.about))
        return table


def make_status_lines(is_terminal: bool) -> StatusLines:
    """In place on a terminal, else one after the other."""
    return LiveLines() if is_terminal else PrintedLines()
