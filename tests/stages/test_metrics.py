"""Metrics by hand-made cases: what counts as the same answer and what does not, and the means."""

from dataclasses import dataclass

import pytest

from stages.metrics import METRICS, exact_match, normalize, score


@dataclass
class Given:
    reference: str
    answer: str
    stopped: bool = True
    num_tokens: int = 1


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("7", "7", True),
        (" 7", "7", True),
        ("7\n", "7", True),
        ("\t7 \n", " 7", True),
        ("Seven", "seven", True),
        ("SEVEN", "sEvEn", True),
        ("the left  one", "the left one", True),
        ("the\nleft\tone", "the left one", True),
        ("the left one", "the \n\n left one ", True),
        ("the\u00a0left", "the left", True),  # a no-break space is white space
        ("\u00c9T\u00c9", "\u00e9t\u00e9", True),
        ("", "", True),
        ("  ", "", True),
        ("1,000", "1,000", True),
        ("\u4e03", "\u4e03", True),
        ("7", "8", False),
        ("", "7", False),
        ("7", "", False),
        ("7.", "7", False),
        ("7.0", "7", False),
        ("07", "7", False),
        ("77", "7", False),
        ("7 7", "7", False),
        ("1000", "1,000", False),
        ("1 000", "1000", False),
        ("seven", "7", False),
        ("the left one", "left one", False),
        ("left", "right", False),
        ("leftone", "left one", False),
        ("left-one", "left one", False),
        ("yes!", "yes", False),
        ("caf\u00e9", "cafe", False),
        ("7<|im_end|>", "7", False),
        ("'7'", "7", False),
        ("-7", "7", False),
    ],
)
def test_exact_match(answer, reference, same):
    assert exact_match(answer, reference) is same
    assert exact_match(reference, answer) is same


def test_normalize_twice_changes_nothing():
    text = "  The\tLEFT \n one "
    assert normalize(text) == "the left one" == normalize(normalize(text))


def test_score_is_the_mean_of_each_metric():
    answers = [
        Given("7", "7", stopped=True, num_tokens=1),
        Given("7", "7 and then", stopped=False, num_tokens=4),
        Given("left", "LEFT ", stopped=True, num_tokens=2),
        Given("2", " ", stopped=True, num_tokens=0),
    ]
    assert score(answers) == {"exact_match": 0.5, "stop_rate": 0.75, "empty_rate": 0.25, "mean_answer_tokens": 1.75}


def test_an_answer_that_ran_on_may_still_match_but_did_not_stop():
    assert score([Given("7", "7", stopped=False)]) == {
        "exact_match": 1.0,
        "stop_rate": 0.0,
        "empty_rate": 0.0,
        "mean_answer_tokens": 1.0,
    }


def test_score_names_every_metric():
    assert list(score([Given("7", "7")])) == list(METRICS)


def test_no_answers_are_no_score():
    with pytest.raises(ValueError, match="no answers"):
        score([])
