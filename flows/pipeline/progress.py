"""The progress of a pipeline for the person who watches it: bars on a terminal, plain lines otherwise.

Tasks report to `display()`. It shows nothing unless the command line replaces it (see `shown`). Under a Prefect worker,
the logs and the UI show the progress.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainer.contract.result import MetricsRow

_LINE_SECONDS = 5.0


class Display:
    """A receiver of reports about running stages. This base class shows nothing."""

    def started(self, stage: str) -> None: ...
    def progressed(self, stage: str, finished: int, total: int, text: str = "") -> None: ...
    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None: ...
    def close(self) -> None: ...


class LineDisplay(Display):
    """A display that prints one line every few seconds while a stage runs, and one line when it ends."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def started(self, stage: str) -> None:
        self._last = time.monotonic()

    def progressed(self, stage: str, finished: int, total: int, text: str = "") -> None:
        if finished < total and time.monotonic() - self._last < _LINE_SECONDS:
            return
        self._last = time.monotonic()
        print(f"{stage}: {finished:,} of {total:,}{'  ' + text if text else ''}", flush=True)

    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None:
        how = "reused" if reused else f"made in {seconds:.1f} s"
        print(f"{stage}: {how}{'  ' + text if text else ''}", flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class BarDisplay(Display):
    """A display that draws one progress bar per stage."""

    def __init__(self, terminal: TextIO) -> None:
        columns = [TextColumn("{task.description:<15}"), BarColumn(28), MofNCompleteColumn(), TimeElapsedColumn()]
        columns += [TimeRemainingColumn(), TextColumn("{task.fields[text]}")]
        # rich would print what others print, without escapes.
        self._progress = Progress(*columns, console=Console(file=terminal), redirect_stdout=False)
        self._tasks: dict[str, int] = {}
        self._progress.start()

    def started(self, stage: str) -> None:
        self._tasks[stage] = self._progress.add_task(stage, total=None, text="")

    def progressed(self, stage: str, finished: int, total: int, text: str = "") -> None:
        self._progress.update(self._tasks[stage], completed=finished, total=total, text=text)

    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None:
        task = self._tasks[stage]
        total = self._progress.tasks[task].total or 1
        self._progress.update(task, completed=total, total=total, text="reused" if reused else text)

    def close(self) -> None:
        self._progress.stop()


_display = Display()


def display() -> Display:
    """Return the display in use."""
    return _display


@contextlib.contextmanager
def shown(terminal: TextIO | None) -> Iterator[Display]:
    """Show the tasks' reports while the block lasts: as bars on a terminal, or as printed lines if there is none."""
    global _display
    _display = LineDisplay() if terminal is None else BarDisplay(terminal)
    try:
        yield _display
    finally:
        _display.close()
        _display = Display()


def show_rows(stage: str, rows: Sequence[MetricsRow], num_steps: int) -> str:
    """Show the newest metrics of a training on the display, and return their text."""
    row = rows[-1]
    heldout = next((f"  held-out {r.heldout_loss:.4f}" for r in reversed(rows) if r.heldout_loss is not None), "")
    text = f"loss {row.loss:.4f}{heldout}  {row.tokens_per_second:,.0f} tokens/s"
    display().progressed(stage, row.step, num_steps, text)
    return text
