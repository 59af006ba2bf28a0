"""The display of progress: lines for a file, bars for a terminal, nothing under a worker."""

import io
import sys

import pytest
from rich.console import Console

from flows.cli.terminal import print_table
from flows.pipeline import progress
from flows.pipeline.progress import BarDisplay, Display, LineDisplay, display, show_rows, shown
from tests.helpers.fake_trainer import metrics_row


def test_lines_are_few_and_say_what_happened(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 1000.0)
    with shown(None) as lines:
        assert isinstance(lines, LineDisplay)
        lines.started("train")
        for step in (1, 2, 3):
            show_rows("train", [metrics_row(step)], 3)
        lines.ended("train", False, 12.3)
        lines.ended("export", True, 0.0)
    assert capsys.readouterr().out.splitlines() == [
        "train: 3 of 3  loss 0.3333  0 tokens/s",
        "train: made in 12.3 s",
        "export: reused",
    ]


def test_bars_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda file: Console(file=screen, force_terminal=True, width=120))
    with pytest.raises(KeyboardInterrupt), shown(sys.stdout) as bars:
        assert isinstance(bars, BarDisplay)
        bars.started("train")
        show_rows("train", [metrics_row(2, heldout_loss=1.5)], 4)
        bars.ended("train", False, 1.0)
        bars.started("export")
        bars.ended("export", True, 0.0)
        raise KeyboardInterrupt
    assert type(display()) is Display, "silent again, however the block ended"
    text = screen.getvalue()
    assert "train" in text and "4/4" in text and "reused" in text and "export" in text


def test_nothing_is_shown_unless_asked(capsys):
    display().started("train")
    show_rows("train", [metrics_row(1)], 2)
    display().ended("train", True, 0.0)
    assert capsys.readouterr().out == ""


def test_plain_tables_are_aligned(capsys):
    print_table("Scores", ("subset", "n"), [("digits", "7"), ("all", "1,250")], is_terminal=False)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "Scores",
        "  subset      n",
        "  digits      7",
        "  all     1,250",
    ]
