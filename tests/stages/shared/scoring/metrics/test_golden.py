"""Every metric of texts against its reference, number by number, and what holds for all of them. Where athanor differs
from a reference, the table says by how much and why."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.subsets import METRICS

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

GOLDEN = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}
# Of test_captions.py, test_cord.py and test_times.py.
OTHER_TABLES = {"cider", "bleu4", "rouge_l", "cord_nted", "cord_f1", "temporal_iou"}
OTHER_TABLES |= {name for name in METRICS if name.startswith(("iou", "acc_iou", "box_", "coco_"))}  # of test_boxes.py
TOLERANCE = 1e-6
of_any_number = pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {"vqa_accuracy"}))  # of references


def judged(case: dict[str, Any]) -> Judged:
    return Judged(question=case.get("question", ""), references=tuple(case["references"]), answer=case["answer"])


def all_judged(name: str) -> list[Judged]:
    return [judged(case) for case in (*GOLDEN[name]["cases"], *GOLDEN[name]["differences"])]


def others(name: str, kind: str) -> list[str]:
    """Return the cases of a table whose score differs from the table's."""
    found = []
    for at, case in enumerate(GOLDEN[name][kind]):
        score = METRICS[name].score([judged(case)])
        if score != pytest.approx(case["score"], abs=TOLERANCE, rel=0):
            found.append(f"{kind}[{at}] of {name} scores {score}, not {case['score']}: {case}")
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_equals_the_reference(name):
    assert others(name, "cases") == []


@pytest.mark.parametrize("name", GOLDEN)
def test_differs_where_it_should_and_as_it_should(name):
    assert others(name, "differences") == []
    for case in GOLDEN[name]["differences"]:
        assert abs(case["score"] - case["reference_score"]) > 2 * TOLERANCE, case
        assert len(case["reason"]) > 20, case


@pytest.mark.parametrize("name", sorted(METRICS.keys() - OTHER_TABLES))
def test_a_table_has_thirty_cases_right_and_wrong_ones(name):
    golden = GOLDEN[name]
    scores = [case["score"] for case in golden["cases"]]
    assert golden["metric"] == name and golden["reference"] and golden["made_with"]
    assert len(scores) >= 30
    assert sum(score > 0.99 for score in scores) >= 5 and sum(score < 0.01 for score in scores) >= 3


@pytest.mark.parametrize("name", ["cer", "wer"])
def test_a_rate_of_a_corpus_equals_the_references(name):
    single = [judged(case) for case in GOLDEN[name]["cases"] if len(case["references"]) == 1]
    assert METRICS[name].score(single) == pytest.approx(GOLDEN[name]["corpus"], abs=TOLERANCE, rel=0)
    assert METRICS[name].score(single) != pytest.approx(sum(METRICS[name].score([a]) for a in single) / len(single))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_row_of_an_answer_does_not_depend_on_the_others(name):
    metric, answers = METRICS[name], all_judged(name)
    statistics = metric.statistics(answers)
    assert statistics.shape == (len(answers), len(metric.columns)) and statistics.dtype == np.float64
    one_by_one = np.concatenate([metric.statistics([answer]) for answer in answers])
    assert np.array_equal(statistics, one_by_one)


@pytest.mark.parametrize("name", GOLDEN)
def test_weighting_rows_is_repeating_answers(name):
    metric, answers = METRICS[name], all_judged(name)
    times = np.random.default_rng(0).integers(0, 4, size=(5, len(answers)))
    scores = metric.value(times @ metric.statistics(answers))
    assert scores.shape == (5,)
    for weights, score in zip(times, scores):
        drawn = [answer for answer, count in zip(answers, weights) for _ in range(count)]
        assert metric.score(drawn) == pytest.approx(float(score), abs=1e-9)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_order_of_answers_and_of_references_does_not_matter(name):
    metric, answers = METRICS[name], all_judged(name)
    shuffled = [replace(answer, references=answer.references[::-1]) for answer in answers]
    random.Random(1).shuffle(shuffled)
    assert metric.score(shuffled) == pytest.approx(metric.score(answers), abs=1e-9)


@of_any_number
def test_a_wrong_reference_more_never_lowers_a_score(name):
    metric = METRICS[name]
    sign = 1 if metric.higher_is_better else -1
    for answer in all_judged(name):
        more = replace(answer, references=(*answer.references, "quite another thing"))
        assert sign * metric.score([more]) >= sign * metric.score([answer]) - 1e-12


@of_any_number
def test_a_reference_is_a_perfect_answer(name):
    metric = METRICS[name]
    best = 1.0 if metric.higher_is_better else 0.0
    for answer in all_judged(name):
        for reference in filter(str.strip, answer.references):
            assert metric.score([replace(answer, answer=reference)]) == best, (reference, answer)


@pytest.mark.parametrize("name", GOLDEN)
def test_no_answers_are_no_score(name):
    metric = METRICS[name]
    with pytest.raises(ValueError, match="no answers"):
        metric.score([])
    assert metric.statistics([]).shape == (0, 2)
    assert np.isnan(metric.value(np.zeros((3, 2)))).all()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_metric_says_what_it_is_and_where_from(name):
    metric = METRICS[name]
    assert len(metric.definition) > 40 and len(metric.source) > 40
    assert metric.higher_is_better is (name not in ("cer", "wer"))
    assert (metric.unparsed(all_judged(name)) is None) is (name != "multiple_choice")
