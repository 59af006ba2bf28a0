"""CIDEr-D, BLEU-4, ROUGE-L and their words, number by number against pycocoevalcap and sacrebleu."""

import json
from collections.abc import Iterable

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from stages.shared.scoring.metrics.captions import Bleu, Cider, RougeL
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.ptb_tokens import words_of
from tests.stages.shared.scoring.metrics.caption_cases import CAPTIONS, CAPTIONS_JSON, TEXTS

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

RECORDED = json.loads(CAPTIONS_JSON.read_text())
NUMBERS = range(len(CAPTIONS))
EXACT = {"abs": 1e-6, "rel": 0}


def judged(answer: str, *references: str) -> Judged:
    return Judged(question="Describe.", references=references, answer=answer)


ANSWERS = [judged(answer, *references) for answer, references in CAPTIONS]


@pytest.fixture(scope="module")
def cider_rows() -> np.ndarray:
    return Cider().statistics(ANSWERS)


def test_there_are_enough_cases():
    assert len(CAPTIONS) >= 30
    for name in ("cider", "bleu4_of_five", "rouge_l"):
        assert len({round(score, 6) for score in RECORDED[name] if score not in (0, 1)}) >= 24
    assert len(RECORDED["cider"]) == len(RECORDED["rouge_l"]) == len(RECORDED["bleu4"]) == len(CAPTIONS)


def assert_recorded(name: str, scores: Iterable[float], at: Iterable[int] = NUMBERS) -> None:
    """Check that every score equals the recorded one; the error names all that differ."""
    recorded = [RECORDED[name][number] for number in at]
    differ = [
        f"{name}[{number}] is {score}, not {theirs}"
        for number, score, theirs in zip(at, scores, recorded, strict=True)
        if score != pytest.approx(theirs, **EXACT)
    ]
    assert differ == []


def test_cider_of_each_answer_is_the_references(cider_rows):
    assert_recorded("cider", cider_rows[:, 0])


def test_rouge_of_each_answer_is_the_references():
    assert_recorded("rouge_l", [RougeL().score([answer]) for answer in ANSWERS])


def test_bleu_of_each_answer_is_sacrebleus():
    assert_recorded("bleu4", [Bleu().score([answer]) for answer in ANSWERS])


def test_bleu_of_five_answers_is_sacrebleus():
    at = range(len(CAPTIONS) - 4)
    assert_recorded("bleu4_of_five", [Bleu().score(ANSWERS[first : first + 5]) for first in at], at)


def test_bleu_of_each_answer_is_that_of_coco():
    at = [number for number in NUMBERS if RECORDED["bleu4"][number] > 0]
    assert_recorded("bleu4_coco", [Bleu().score([ANSWERS[number]]) for number in at], at)


@pytest.mark.parametrize("metric", [Cider(), RougeL(), Bleu()], ids=lambda metric: metric.name)
def test_score_of_all_is_the_references(metric):
    assert metric.score(ANSWERS) == pytest.approx(RECORDED["all"][metric.name], **EXACT)


def test_bleu_of_all_is_that_of_coco():
    assert Bleu().score(ANSWERS) == pytest.approx(RECORDED["all"]["bleu4_coco"], **EXACT)


def test_words_are_those_of_java():
    assert len(TEXTS) == len(RECORDED["words"])
    found = zip(TEXTS, RECORDED["words"])
    assert [(text, words, words_of(text)) for text, words in found if list(words_of(text)) != words] == []


# (text, the reference's words, our words); the docstring of ptb_tokens.py gives the reasons
OTHER_WORDS = [
    ("and/orfile.txt", ["and/orfile", "txt"], ["and/orfile.txt"]),  # a file's name behind a slash
    ("x \u0384 y", ["x", "\u0384", "y"], ["x", "y"]),  # a Greek accent by itself is a letter there
    ("x \u0528 y", ["x", "y"], ["x", "\u0529", "y"]),  # a letter newer than the lexer's Unicode
]


@pytest.mark.parametrize(("text", "theirs", "ours"), OTHER_WORDS)
def test_words_that_differ(text, theirs, ours):
    assert list(words_of(text)) == ours != theirs


def test_bleu_without_a_common_4_gram_is_0_and_not_the_small_number_of_coco():
    # pycocoevalcap adds 1e-15 to matches before the fourth root.
    without = [at for at in NUMBERS if RECORDED["bleu4"][at] == 0]
    assert len(without) >= 5
    assert max(RECORDED["bleu4_coco"][at] for at in without) > 1e-5
    assert all(Bleu().score([ANSWERS[at]]) == 0 for at in without)


def test_bleu_of_sums_is_sacrebleus_of_the_same_counts():
    rows = Bleu().statistics(ANSWERS)
    sums = np.stack([rows[at : at + 7].sum(axis=0) for at in range(len(rows) - 7)])
    counts = sums.astype(int).tolist()
    theirs = [BLEU.compute_bleu(c[:4], c[4:8], c[8], c[9], smooth_method="none").score / 100 for c in counts]
    assert max(theirs) > 0.2
    np.testing.assert_allclose(Bleu().value(sums), theirs, atol=1e-12)
    assert Bleu().value(sums.reshape(-1, 3, 10)[:5]).shape == (5, 3)


def test_bleu_of_nothing_is_no_number_and_an_empty_answer_is_wrong():
    assert np.isnan(Bleu().value(np.zeros(10)))
    assert np.isnan(Bleu().score([judged("", "")]))
    assert Bleu().score([judged("", "a dog in the park")]) == 0


def test_cider_of_an_answer_does_not_depend_on_other_answers(cider_rows):
    others = [*ANSWERS[:5], *(judged("a cat", *answer.references) for answer in ANSWERS[5:])]
    np.testing.assert_array_equal(Cider().statistics(others)[:5], cider_rows[:5])


def test_cider_knows_a_word_that_all_references_have_as_worth_nothing():
    same = [judged("dog", "dog", "a dog"), judged("dog", "dog"), judged("a cat", "dog")]
    assert Cider().statistics(same)[1, 0] == 0
    assert Cider().score([judged("a dog in the park", "a dog in the park")]) == 0


@pytest.mark.parametrize("metric", [Cider(), RougeL(), Bleu()], ids=lambda metric: metric.name)
def test_no_answers(metric):
    assert metric.statistics([]).shape == (0, len(metric.columns))
    assert metric.unparsed(ANSWERS) is None
    with pytest.raises(ValueError, match="no answers"):
        metric.score([])


def test_rouge_takes_the_best_precision_and_the_best_recall_each():
    # The first reference gives recall 1, the second precision 1; no single reference gives both.
    assert RougeL().score([judged("a b c d", "a b", "a b c d e f g h")]) == 1.0


def test_rouge_of_two_texts_without_words_is_1_as_there():
    # pycocoevalcap splits no words into one empty word, which both texts have in common.
    assert RougeL().score([judged("", "...")]) == RougeL().score([judged("!", "")]) == 1.0
    assert RougeL().score([judged("", "a dog")]) == RougeL().score([judged("a dog", "...")]) == 0.0
