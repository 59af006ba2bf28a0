"""Which answers count as equal and which do not."""

import pytest

from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.texts import ExactMatch, normalize

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)


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
    assert ExactMatch().score([Judged(question="?", references=(reference,), answer=answer)]) == same
    assert ExactMatch().score([Judged(question="?", references=(answer,), answer=reference)]) == same


def test_normalize_twice_changes_nothing():
    text = "  The\tLEFT \n one "
    assert normalize(text) == "the left one" == normalize(normalize(text))
