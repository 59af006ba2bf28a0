"""Error rates: a corpus, several references, and empty texts."""

import numpy as np
import pytest

from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.texts import CER, WER

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)


def judged(answer, *references):
    return Judged(question="", references=references, answer=answer)


def test_the_rate_is_that_of_the_corpus():
    answers = [judged("a", "a"), judged("x", "abcdefghi")]
    assert CER().statistics(answers).tolist() == [[0, 1], [9, 9]]
    assert CER().score(answers) == 0.9  # not the mean of 0 and 1
    assert WER().statistics([judged("one two", "one three two")]).tolist() == [[1, 3]]


def test_the_reference_of_the_lowest_rate_counts_with_its_length():
    assert CER().statistics([judged("abc", "abcd", "ab", "abcdefgh")]).tolist() == [[1, 4]]
    assert CER().statistics([judged("abc", "ab", "abcd")]).tolist() == [[1, 4]]
    assert CER().statistics([judged("ab", "ax", "abxx")]).tolist() == [[1, 2]]  # the shorter of equal rates


def test_empty_texts():
    assert CER().statistics([judged("", "abc"), judged("abc", ""), judged("", "")]).tolist() == [[3, 3], [3, 0], [0, 0]]
    assert CER().statistics([judged("abc", "", "xyz")]).tolist() == [[3, 3]]
    assert np.isnan(CER().score([judged("", "")]))
    assert WER().score([judged(" \n", "two words")]) == 1.0


def test_an_answer_that_runs_on_is_above_one():
    assert WER().score([judged("a b c d", "a")]) == pytest.approx(3.0)
