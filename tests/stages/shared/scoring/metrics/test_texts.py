"""Metrics of texts beyond their golden tables: white space, EvalAI's normal form, and error rates."""

import numpy as np
import pytest

from dataset_builders.errors import InputError
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.texts import CER, WER, ExactMatch, VQAAccuracy, evalai_normalize

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)


def judged(answer: str, *references: str) -> Judged:
    return Judged(question="What is it?", references=references, answer=answer)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("the left one", "the \n\n left one "), ("  ", ""), ("The\tLEFT \n one", "the left one"), ("\u00c9T", "\u00e9t")],
)
def test_neither_white_space_nor_case_tells_texts_apart(answer, reference):
    assert ExactMatch().score([judged(answer, reference)]) == ExactMatch().score([judged(reference, answer)]) == 1


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("couldnt've couldn'tve", "couldn't've couldn't've"),
        ("1,000.50!", "1000.50"),
        ("well - known-ish", "well knownish"),
        ("x-y-\nz", "xy z"),
        ("An, the?", ""),
    ],
)
def test_normal_form(text, form):
    assert evalai_normalize(text) == form


def test_one_annotator_is_an_error_with_a_way_out():
    with pytest.raises(InputError, match=r"vqa_accuracy needs .* two annotators.*'What is it.'.*vqa_em"):
        VQAAccuracy().score([judged("yes", "yes")])


def test_the_rate_is_that_of_the_corpus():
    answers = [judged("a", "a"), judged("x", "abcdefghi")]
    assert CER().statistics(answers).tolist() == [[0, 1], [9, 9]]
    assert CER().score(answers) == 0.9  # not the mean of 0 and 1
    assert WER().statistics([judged("one two", "one three two")]).tolist() == [[1, 3]]


def test_the_reference_of_the_lowest_rate_counts_with_its_length():
    assert CER().statistics([judged("abc", "abcd", "ab", "abcdefgh")]).tolist() == [[1, 4]]
    assert CER().statistics([judged("abc", "ab", "abcd")]).tolist() == [[1, 4]]
    assert CER().statistics([judged("ab", "ax", "abxx")]).tolist() == [[1, 2]]  # the shorter of equal rates


def test_the_rates_of_empty_texts():
    assert CER().statistics([judged("", "abc"), judged("abc", ""), judged("", "")]).tolist() == [[3, 3], [3, 0], [0, 0]]
    assert CER().statistics([judged("abc", "", "xyz")]).tolist() == [[3, 3]]
    assert np.isnan(CER().score([judged("", "")]))
    assert WER().score([judged(" \n", "two words")]) == 1.0
