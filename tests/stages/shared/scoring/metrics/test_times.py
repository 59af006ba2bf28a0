"""Temporal IoU, by hand."""

import numpy as np
import pytest

from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.times import TemporalIoU, read_span

pytestmark = pytest.mark.promise("Answers with times are scored by temporal IoU, as cases computed by hand.")


def judged(answer: str, *references: str) -> Judged:
    return Judged(question="When does it move?", references=references, answer=answer)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("24.3 - 30.4 seconds", (24.3, 30.4)),
        ("From 24.3s to 30.4s.", (24.3, 30.4)),
        ("The 2 men run in 3 seconds and 5 seconds, and again from 8 to 9", (3.0, 5.0)),
        ("[1.0, 2.5]", (1.0, 2.5)),
        ("0:24\u20131:05", (24.0, 65.0)),
        ("1:00:01.5 until 1:00:03", (3601.5, 3603.0)),
        ("<0.2 seconds> to <1.0 seconds>", (0.2, 1.0)),
        ("at 7 seconds", None),
        ("from 9 to 3 seconds", None),
        ("", None),
    ],
)
def test_the_first_span_of_a_text(text, span):
    assert read_span(text) == span


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("2.0 - 4.0 seconds", ("2.0 - 4.0 seconds",), 1.0),
        ("2 to 4", ("3 to 5",), 1 / 3),  # 1 s is common, of 3 s
        ("0 to 10", ("4 to 6",), 0.2),
        ("1 to 2", ("2 to 3",), 0.0),
        ("1 to 2", ("5 to 9",), 0.0),
        ("5 to 9", ("1 to 2", "4 to 8"), 3 / 5),  # the better of two right ones
        ("3 to 3", ("3 to 3",), 1.0),
        ("later", ("3 to 4",), 0.0),
    ],
)
def test_overlaps_by_hand(answer, references, score):
    assert TemporalIoU().score([judged(answer, *references)]) == pytest.approx(score)


def test_answers_without_a_right_span_are_in_no_score_and_unread_ones_are_counted():
    answers = [judged("2 to 4", "3 to 5"), judged("red", "red"), judged("late", "3 to 5")]
    assert TemporalIoU().score(answers) == pytest.approx(1 / 6)
    assert TemporalIoU().unparsed(answers).tolist() == [False, False, True]
    assert np.isnan(TemporalIoU().score([judged("red", "red")]))
