"""Relaxed accuracy: numbers within 5 percent, equality of other texts."""

import math

from stages.shared.scoring.metrics.contract import Judged, MeanMetric

MAX_RELATIVE_CHANGE = 0.05


def _text(text: str) -> str:
    """Return the text stripped, without one full stop at the end."""
    text = text.strip()
    return text.removesuffix(".").rstrip()


def _number(text: str) -> float | None:
    """Return the number that the text represents, "5%" as 0.05; None for anything except a finite number."""
    try:
        number = float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def is_relaxed_match(answer: str, reference: str) -> bool:
    """Whether both are numbers that differ by at most 5 percent of the reference, or equal texts apart from case."""
    answer, reference = _text(answer), _text(reference)
    number, right = _number(answer), _number(reference)
    if number is None or right is None:
        return answer.lower() == reference.lower()
    if right == 0:
        return number == 0
    return abs(number - right) / abs(right) <= MAX_RELATIVE_CHANGE


class RelaxedAccuracy(MeanMetric):
    """The share of answers that are right within 5 percent, for questions about charts."""

    name = "relaxed_accuracy"
    definition = (
        "1 where answer and a reference are numbers (5% is 0.05; 1,000 is no number) with |answer - reference| / "
        "|reference| <= 0.05, or the same text but for case; else 0; the mean over answers"
    )
    source = (
        "Masry et al., ChartQA, arXiv 2203.10244, section 5.1, as in pix2struct metrics.py and lmms-eval 0.7.3 "
        "tasks/chartqa/utils.py relaxed_correctness. As there, 5% is not 5, and 1,000 is not 1000. Ours leaves out "
        "white space at the ends and one full stop, which the_cauldron puts behind every answer; takes 0.0 for 0, "
        "where the original compares texts; and takes nan and inf for words"
    )

    def score_one(self, answer: Judged) -> float:
        return float(any(is_relaxed_match(answer.answer, reference) for reference in answer.references))
