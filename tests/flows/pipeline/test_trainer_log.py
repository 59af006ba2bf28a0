"""The trainer's lines in a flow run's log: they have levels and a limited rate, and an error is always written."""

import logging

import pytest

from flows.pipeline import tasks
from flows.pipeline.tasks import BURST_LINES, LINES_A_SECOND, log_lines


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def heard(monkeypatch) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    logger = logging.Logger("of-a-run")
    logger.addHandler(Keeper())
    monkeypatch.setattr(tasks, "get_run_logger", lambda: logger)
    return lines


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("12:00:01 checkpoint: step-001000", logging.INFO),
        ("Traceback (most recent call last):", logging.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory", logging.ERROR),
        ("12:00:01 WARNING a checkpoint is kept aside", logging.WARNING),
        ("grad_norm error-free", logging.INFO),
    ],
)
def test_levels(heard, line, level):
    log_lines()(line)
    assert heard == [(level, f"trainer: {line}")]


def test_steps_and_warnings_of_libraries_are_left_to_the_file(heard):
    say = log_lines()
    for line in (
        "12:00:01 step 5 loss 0.2",
        "x.py:41: FutureWarning: old",
        "  return f(x)",
        "  a table",
        "12:00:02 end",
    ):
        say(line)
    assert [text for _, text in heard] == ["trainer:   a table", "trainer: 12:00:02 end"]


def test_a_chatty_trainer_is_cut_and_counted_and_its_error_is_not(heard):
    clock = Clock()
    say = log_lines(clock)
    for number in range(1000):
        say(f"line {number}")
    say("ValueError: no")
    say("")
    assert len(heard) == BURST_LINES + 1 and heard[-1] == (logging.ERROR, "trainer: ValueError: no")
    clock.now += 1 / LINES_A_SECOND
    say("later")
    assert [text for _, text in heard[-2:]] == [
        f"({1000 - BURST_LINES} lines of the trainer left out here; all are in its log file)",
        "trainer: later",
    ]
