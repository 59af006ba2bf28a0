"""What a person sees while the pipeline runs: bars on a terminal, plain lines elsewhere.

Tasks report to `display()`, which is silent unless the command line has put another one in its place: under a Prefect
worker the logs and the UI show the progress.
"""

import sys
import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainer.contract import MetricsRow

_LINE_SECONDS = 5.0


class Display(Protocol):
    """Hears of stages as they run."""

    def started(self, stage: str) -> None: ...
    def progressed(self, stage: str, done: int, total: int, text: str = "") -> None: ...
    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None: ...
    def close(self) -> None: ...


class SilentDisplay:
    """Shows nothing."""

    def started(self, stage: str) -> None: ...
    def progressed(self, stage: str, done: int, total: int, text: str = "") -> None: ...
    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None: ...
    def close(self) -> None: ...


class LineDisplay:
    """A line when a stage starts and ends, and every few seconds while it runs."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def started(self, stage: str) -> None:
        self._last = time.monotonic()

    def progressed(self, stage: str, done: int, total: int, text: str = "") -> None:
        if done < total and time.monotonic() - self._last < _LINE_SECONDS:
            return
        self._last = time.monotonic()
        _say(f"{stage}: {done:,} of {total:,}{'  ' + text if text else ''}")

    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None:
        _say(f"{stage}: {'reused' if reused else f'made in {seconds:.1f} s'}{'  ' + text if text else ''}")

    def close(self) -> None:
        sys.stdout.flush()


class BarDisplay:
    """A progress bar a stage."""

    def __init__(self) -> None:
        columns = [TextColumn("{task.description:<15}"), BarColumn(28), MofNCompleteColumn(), TimeElapsedColumn()]
        self._progress = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[text]}"), console=Console())
        self._tasks: dict[str, int] = {}
        self._progress.start()

    def started(self, stage: str) -> None:
        self._tasks[stage] = self._progress.add_task(stage, total=None, text="")

    def progressed(self, stage: str, done: int, total: int, text: str = "") -> None:
        self._progress.update(self._tasks[stage], completed=done, total=total, text=text)

    def ended(self, stage: str, reused: bool, seconds: float, text: str = "") -> None:
        task = self._tasks[stage]
        total = self._progress.tasks[task].total or 1
        self._progress.update(task, completed=total, total=total, text="reused" if reused else text)

    def close(self) -> None:
        self._progress.stop()


_display: Display = SilentDisplay()


def display() -> Display:
    """The display in use."""
    return _display


def use_display(new: Display) -> None:
    """Put a display in the place of the one in use."""
    global _display
    _display = new


def make_display(is_terminal: bool) -> Display:
    """Bars for a terminal, lines for a file or a pipe."""
    return BarDisplay() if is_terminal else LineDisplay()


def show_rows(stage: str, rows: Sequence[MetricsRow], num_steps: int) -> None:
    """Hand the newest of the training's metrics to the display."""
    row = rows[-1]
    heldout = next((f"  held-out {r.heldout_loss:.4f}" for r in reversed(rows) if r.heldout_loss is not None), "")
    text = f"loss {row.loss:.4f}{heldout}  {row.tokens_per_second:,.0f} tokens/s"
    display().progressed(stage, row.step, num_steps, text)


def _say(text: str) -> None:
    print(text, flush=True)
