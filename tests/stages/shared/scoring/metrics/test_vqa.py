"""EvalAI's normal form, and several annotators."""

import pytest

from dataset_builders.errors import InputError
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.texts import VQAAccuracy, VQAExactMatch, evalai_normalize

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)


def judged(answer, *references):
    return Judged(question="What is it?", references=references, answer=answer)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The Two dogs.", "2 dogs"),
        ("dont", "don't"),
        ("couldnt've couldn'tve", "couldn't've couldn't've"),
        ("somebody'd", "somebodyd"),
        ("It's", "it 's"),
        ("1,000.50!", "1000.50"),
        ("red/blue", "red blue"),
        ("red /blue", "red blue"),
        ("well - known-ish", "well knownish"),
        ("a\nb\tc", "b c"),
        ("x-y-\nz", "xy z"),
        ("An, the?", ""),
    ],
)
def test_normal_form(text, form):
    assert evalai_normalize(text) == form


def test_one_annotator_is_an_error_with_a_way_out():
    with pytest.raises(InputError, match=r"vqa_accuracy needs .* two annotators.*'What is it.'.*vqa_em"):
        VQAAccuracy().score([judged("yes", "yes")])


@pytest.mark.parametrize(("agreeing", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_ten_annotators(agreeing, score):
    """The score is the mean over leaving out each of ten annotators once."""
    answers = ["yes"] * agreeing + ["no"] * (10 - agreeing)
    assert VQAAccuracy().score([judged("Yes!", *answers)]) == pytest.approx(score, abs=1e-12)


def test_nothing_left_of_an_answer_is_not_the_article_that_is_right():
    assert VQAExactMatch().score([judged("", "A")]) == 0.0
    assert VQAExactMatch().score([judged("a", "A")]) == 1.0
