"""Scores by subset and their mean, against sums by hand."""

import pytest

from stages.shared.scoring.intervals import Bootstrap
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.subsets import SubsetMetrics
from stages.shared.scoring.summary import AnswerSet, score_subsets, table_of

BOOTSTRAP = Bootstrap(resamples=500, seed=3)


def answered(rows: list[tuple[str, str, str]]) -> AnswerSet:
    """Return (subset, reference, answer) rows as an answer set, each sample with its own image."""
    names = [f"{subset}/{number:08d}" for number, (subset, _, _) in enumerate(rows)]
    judged = [Judged(question="?", references=(reference,), answer=answer) for _, reference, answer in rows]
    return AnswerSet(
        subset=[subset for subset, _, _ in rows], sample=names, pictures=[[name] for name in names], judged=judged
    )


ROWS = [
    *(("digits_single", "7", "7" if right else "1") for right in (1, 1, 1, 0)),
    *(("digits_text", "ten", "ten" if right else "one") for right in (1, 0)),
    *(("rendered_text", "abcd", "abcz") for _ in range(2)),
]
EXACT = SubsetMetrics(headline="exact_match", others=(), reason="")
METRICS = {
    **dict.fromkeys(("digits_single", "digits_text"), EXACT),
    "rendered_text": SubsetMetrics(headline="cer", others=("exact_match",), reason=""),
}


@pytest.fixture(scope="module")
def table():
    given = answered(ROWS)
    return table_of(given, *score_subsets(given, METRICS, BOOTSTRAP))


def test_a_subset_has_its_own_metrics_and_a_score_that_is_better_high(table):
    assert table["digits_single"]["exact_match"] == table["digits_single"]["score"] == 0.75
    assert table["rendered_text"] == {"cer": 0.25, "exact_match": 0.0, "score": 0.75}


def test_overall_is_each_metric_over_the_answers_that_have_it_and_the_mean_of_the_scores(table):
    assert table["overall"]["exact_match"] == pytest.approx(4 / 8)
    assert table["overall"]["cer"] == pytest.approx(0.25)
    assert table["overall"]["score"] == pytest.approx((0.75 + 0.5 + 0.75) / 3)


def test_answers_of_no_form_are_counted_where_a_metric_looks_for_one():
    question = "What is it?\nChoices:\nA. a cat\nB. a dog\nAnswer with the letter."
    said = [Judged(question=question, references=("A",), answer=answer) for answer in ("A", "B", "who knows", "A")]
    rows = answered([("ai2d", "A", "A")] * 4)
    given = AnswerSet(subset=rows.subset, sample=rows.sample, pictures=rows.pictures, judged=said)
    choices = SubsetMetrics(headline="multiple_choice", others=(), reason="")
    scores, score = score_subsets(given, {"ai2d": choices}, BOOTSTRAP)
    found = table_of(given, scores, score)
    assert found["ai2d"] == {"multiple_choice": 0.5, "score": 0.5, "parse_failure_rate": 0.25}
    assert found["overall"]["parse_failure_rate"] == 0.25
    assert list(scores["ai2d"].rows) == [1, 0, 0, 1]


def test_the_interval_is_of_samples_and_not_of_answers():
    one = answered([("digits_single", "7", "7" if number % 2 else "1") for number in range(40)])
    paired = AnswerSet(
        subset=one.subset, sample=[f"s/{n // 20}" for n in range(40)], pictures=[[]] * 40, judged=one.judged
    )
    apart, together = (score_subsets(given, METRICS, BOOTSTRAP)[0]["digits_single"].headline for given in (one, paired))
    assert apart.value == together.value == 0.5
    assert apart.high - apart.low > 0.2 and together.low == together.high == 0.5
