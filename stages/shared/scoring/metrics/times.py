"""Scores of answers that are spans of time in a video."""

import re
from collections.abc import Sequence

import numpy as np

from stages.shared.scoring.metrics.contract import Judged, MeanMetric

_TIME = r"(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d+)?)"  # 7, 7.5, 1:07.5 or 1:01:07
_UNIT = r"\s*(?:seconds|secs?|s)?\b"
_SPAN = re.compile(
    rf"(?<![\d:.]){_TIME}{_UNIT}>?\s*(?:-|\u2013|\u2014|~|,|to|and|until)\s*<?{_TIME}(?![\d:])", re.IGNORECASE
)


def read_span(text: str) -> tuple[float, float] | None:
    """Return the first span of a text in seconds: two times joined by a dash, a comma, to, and, or until, such as
    `24.3 - 30.4 seconds`, `<24.3 seconds> to <30.4 seconds>`, `0:24-0:30` or `[24.3, 30.4]`. None without one, or if it
    ends before it starts."""
    found = _SPAN.search(text)
    if found is None:
        return None
    parts = [float(part or 0) for part in found.groups()]
    start, end = (hours * 3600 + minutes * 60 + seconds for hours, minutes, seconds in (parts[:3], parts[3:]))
    return (start, end) if start <= end else None


class TemporalIoU(MeanMetric):
    """The mean overlap of a span of time with the true one."""

    name = "temporal_iou"
    definition = (
        "intersection over union, in time, of the answer's first span and the right one, the best if there are several "
        "right ones; 0 without a span; the mean over answers whose references have one"
    )
    source = (
        "mIoU of Gao et al. 2017 (TALL, arXiv 1705.02101), as Charades-STA is scored; ours also reads minutes, and two "
        "equal moments overlap wholly"
    )

    def score_one(self, answer: Judged) -> float:
        span = read_span(answer.answer)
        true = [found for found in map(read_span, answer.references) if found is not None]
        return max((_overlap(span, each) for each in true), default=0.0) if span else 0.0

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        # Not the rows of MeanMetric: an answer without a right span has no score.
        rows = [(self.score_one(answer), 1.0) if _has_span(answer) else (0.0, 0.0) for answer in answers]
        return np.array(rows).reshape(-1, 2)

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        return np.array([_has_span(answer) and read_span(answer.answer) is None for answer in answers], bool)


def _has_span(answer: Judged) -> bool:
    return any(read_span(reference) is not None for reference in answer.references)


def _overlap(one: tuple[float, float], two: tuple[float, float]) -> float:
    union = max(one[1], two[1]) - min(one[0], two[0])
    if not union:  # the same moment
        return 1.0
    # Of spans that do not touch, the union has the gap between them, which does not matter: nothing is common.
    return max(min(one[1], two[1]) - max(one[0], two[0]), 0.0) / union
