"""Properties of all text metrics: sums make the score, and order does not matter."""

import random
from dataclasses import replace

import numpy as np
import pytest

from stages.shared.scoring.subsets import METRICS
from tests.stages.shared.scoring.metrics.golden_cases import GOLDEN, all_judged

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

NAMES = sorted(GOLDEN)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_sum_to_the_score(name):
    metric, answers = METRICS[name], all_judged(name)
    statistics = metric.statistics(answers)
    assert statistics.shape == (len(answers), len(metric.columns)) and statistics.dtype == np.float64
    assert metric.score(answers) == pytest.approx(float(metric.value(statistics.sum(axis=0))), abs=1e-12)
    one_by_one = np.concatenate([metric.statistics([answer]) for answer in answers])
    assert np.array_equal(statistics, one_by_one)


@pytest.mark.parametrize("name", NAMES)
def test_weighting_rows_is_repeating_answers(name):
    metric, answers = METRICS[name], all_judged(name)
    times = np.random.default_rng(0).integers(0, 4, size=(5, len(answers)))
    scores = metric.value(times @ metric.statistics(answers))
    assert scores.shape == (5,)
    for weights, score in zip(times, scores):
        drawn = [answer for answer, count in zip(answers, weights) for _ in range(count)]
        assert metric.score(drawn) == pytest.approx(float(score), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_answers_and_of_references_does_not_matter(name):
    metric, answers = METRICS[name], all_judged(name)
    shuffled = [replace(answer, references=answer.references[::-1]) for answer in answers]
    random.Random(1).shuffle(shuffled)
    assert metric.score(shuffled) == pytest.approx(metric.score(answers), abs=1e-9)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"vqa_accuracy"}))
def test_a_wrong_reference_more_never_lowers_a_score(name):
    metric = METRICS[name]
    sign = 1 if metric.higher_is_better else -1
    for answer in all_judged(name):
        more = replace(answer, references=(*answer.references, "quite another thing"))
        assert sign * metric.score([more]) >= sign * metric.score([answer]) - 1e-12


@pytest.mark.parametrize("name", sorted({*NAMES} - {"vqa_accuracy"}))
def test_a_reference_is_a_perfect_answer(name):
    metric = METRICS[name]
    best = 1.0 if metric.higher_is_better else 0.0
    for answer in all_judged(name):
        for reference in filter(str.strip, answer.references):
            assert metric.score([replace(answer, answer=reference)]) == best, (reference, answer)


@pytest.mark.parametrize("name", NAMES)
def test_no_answers_are_no_score(name):
    metric = METRICS[name]
    with pytest.raises(ValueError, match="no answers"):
        metric.score([])
    assert metric.statistics([]).shape == (0, 2)
    assert np.isnan(metric.value(np.zeros((3, 2)))).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_says_what_it_is_and_where_from(name):
    metric = METRICS[name]
    assert metric.name == name and len(metric.definition) > 40 and len(metric.source) > 40
    assert metric.higher_is_better is (name not in ("cer", "wer"))
    assert (metric.unparsed(all_judged(name)) is None) is (name != "multiple_choice")
