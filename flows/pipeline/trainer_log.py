"""The trainer's lines in the log of the flow run: the lines of rank 0, each with its level, at a limited rate.

All lines are in the file logs/trainer.log of the training. Prefect gets only as many per second as its server can take,
no line of each step (`tasks.py` writes a row every ten seconds), and no warning that a library gives to programmers.
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
_WARNING = re.compile(r"\bWARN(ING)?\b")
_STEP = re.compile(r"^[\d:]+ step \d+ loss ")
_OF_LIBRARIES = re.compile(r":\d+: \w*Warning: ")  # the next line, which is indented, is the line of code


def log_lines(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Return a listener that writes the lines of a job to the current run's log.

    The listener writes up to BURST_LINES at once and then LINES_A_SECOND, and counts the lines that it drops. Errors
    have a share of their own, of the same size, so that other lines never displace them.

    Returns:
        a function of one line, which raises nothing.
    """
    logger = get_run_logger()
    shares = {logging.ERROR: _Share(clock), logging.INFO: _Share(clock)}

    is_code = False

    def log_line(line: str) -> None:
        nonlocal is_code
        was_warned, is_code = is_code, bool(_OF_LIBRARIES.search(line))
        if not line.strip() or is_code or (was_warned and line[0].isspace()) or _STEP.match(line):
            return
        level = logging.WARNING if _WARNING.search(line) else logging.INFO
        if _ERROR.search(line):
            level = logging.ERROR
        share = shares[logging.ERROR if level == logging.ERROR else logging.INFO]
        if not share.takes():
            return
        if share.num_dropped:
            logger.info("(%d lines of the trainer left out here; all are in its log file)", share.num_dropped)
            share.num_dropped = 0
        logger.log(level, "trainer: %s", line.rstrip()[:_MAX_CHARACTERS])

    return log_line


class _Share:
    """A number of lines that may still be written, which grows with time up to BURST_LINES."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.room, self.last, self.num_dropped = clock, float(BURST_LINES), clock(), 0

    def takes(self) -> bool:
        """Take room for one line. Return False, and count the line as dropped, if there is no room."""
        now = self.clock()
        self.room = min(BURST_LINES, self.room + (now - self.last) * LINES_A_SECOND)
        self.last = now
        if self.room < 1:
            self.num_dropped += 1
            return False
        self.room -= 1
        return True
