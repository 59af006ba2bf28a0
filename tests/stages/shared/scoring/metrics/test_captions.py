"""CIDEr-D, BLEU-4, ROUGE-L and their words, number by number against pycocoevalcap and sacrebleu."""

import json

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from stages.shared.scoring.metrics.captions import Bleu, Cider, RougeL
from stages.shared.scoring.metrics.contract import Judged, Metric
from stages.shared.scoring.metrics.ptb_tokens import words_of
from tests.stages.shared.scoring.metrics.caption_cases import CAPTIONS, CAPTIONS_JSON, TEXTS

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

RECORDED = json.loads(CAPTIONS_JSON.read_text())
EXACT = {"atol": 1e-6, "rtol": 0}


def judged(answer: str, *references: str) -> Judged:
    return Judged(question="Describe.", references=references, answer=answer)


ANSWERS = [judged(answer, *references) for answer, references in CAPTIONS]


def test_there_are_enough_cases():
    assert len(CAPTIONS) >= 30
    for name in ("cider", "bleu4_of_five", "rouge_l"):
        assert len({round(score, 6) for score in RECORDED[name] if score not in (0, 1)}) >= 24
    assert len(RECORDED["cider"]) == len(RECORDED["rouge_l"]) == len(RECORDED["bleu4"]) == len(CAPTIONS)


def each_score(metric: Metric) -> np.ndarray:
    return np.array([metric.score([answer]) for answer in ANSWERS])


OF_EACH = {
    "cider": lambda: Cider().statistics(ANSWERS)[:, 0],  # its idf is of all references
    "rouge_l": lambda: each_score(RougeL()),
    "bleu4": lambda: each_score(Bleu()),  # by sacrebleu
    "bleu4_of_five": lambda: [Bleu().score(ANSWERS[first : first + 5]) for first in range(len(CAPTIONS) - 4)],
}


@pytest.mark.parametrize("name", OF_EACH)
def test_each_answer_scores_as_the_reference_has_it(name):
    np.testing.assert_allclose(OF_EACH[name](), RECORDED[name], **EXACT)


@pytest.mark.parametrize(
    ("name", "metric"), [("cider", Cider()), ("rouge_l", RougeL()), ("bleu4", Bleu()), ("bleu4_coco", Bleu())]
)
def test_all_answers_score_as_the_reference_has_it(name, metric):
    np.testing.assert_allclose(metric.score(ANSWERS), RECORDED["all"][name], **EXACT)


def test_bleu_is_that_of_coco_and_0_without_a_common_4_gram():
    # pycocoevalcap adds 1e-15 to matches before the fourth root.
    scores, coco = each_score(Bleu()), np.array(RECORDED["bleu4_coco"])
    without = np.array(RECORDED["bleu4"]) == 0
    np.testing.assert_allclose(scores[~without], coco[~without], **EXACT)
    assert without.sum() >= 5 and coco[without].max() > 1e-5 and not scores[without].any()


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


def test_cider_of_an_answer_does_not_depend_on_other_answers():
    others = [*ANSWERS[:5], *(judged("a cat", *answer.references) for answer in ANSWERS[5:])]
    np.testing.assert_array_equal(Cider().statistics(others)[:5], Cider().statistics(ANSWERS)[:5])


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
