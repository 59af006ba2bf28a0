"""The trainer's own lines in the log of the flow run: rank 0's, each with its level, and never a flood.

All lines are in the file logs/trainer.log of the training; Prefect gets so many a second as its server bears.
"""

import logging
import re
import time
from collections.abc import Callable

from prefect import get_run_logger

BURST_LINES = 100
LINES_A_SECOND = 2.0
_MAX_CHARACTERS = 2000
_ERROR = re.compile(r"^\s*Traceback|\b\w+(Error|Exception)\b:|\bERROR\b|\bCRITICAL\b")
_WARNING = re.compile(r"\bWARN(ING)?\b|\b\w+Warning\b")


def log_lines(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """A listener to the lines of a job that hands them to the current run's log.

    Up to BURST_LINES at once and LINES_A_SECOND on; what is more is left out and counted. Errors are never left out
    for lines of less weight: they have a share of their own, of the same size.

    Returns:
        a function of a line, which raises nothing.
    """
    logger = get_run_logger()
    shares = {logging.ERROR: _Share(clock), logging.INFO: _Share(clock)}

    def say(line: str) -> None:
        if not line.strip():
            return
        level = _level_of(line)
        share = shares[logging.ERROR if level >= logging.ERROR else logging.INFO]
        if not share.takes():
            return
        if missed := share.missed:
            logger.info("(%d lines of the trainer left out here; all are in its log file)", missed)
            share.missed = 0
        logger.log(level, "trainer: %s", line.rstrip()[:_MAX_CHARACTERS])

    return say


class _Share:
    """A bucket of lines that fills again with time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.left, self.last, self.missed = clock, float(BURST_LINES), clock(), 0

    def takes(self) -> bool:
        now = self.clock()
        self.left = min(BURST_LINES, self.left + (now - self.last) * LINES_A_SECOND)
        self.last = now
        if self.left < 1:
            self.missed += 1
            return False
        self.left -= 1
        return True


def _level_of(line: str) -> int:
    if _ERROR.search(line):
        return logging.ERROR
    return logging.WARNING if _WARNING.search(line) else logging.INFO
