"""Every metric against its reference, number by number. Where athanor differs, the test says by how much and why."""

import pytest

from stages.shared.scoring.subsets import METRICS
from tests.stages.shared.scoring.metrics.golden_cases import GOLDEN, judged

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

TABLES = """
anls cer denotation_accuracy exact_match multiple_choice relaxed_accuracy vqa_accuracy vqa_em wer
"""
TOLERANCE = 1e-6


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


@pytest.mark.parametrize("name", GOLDEN)
def test_a_table_has_thirty_cases_right_and_wrong_ones(name):
    golden = GOLDEN[name]
    scores = [case["score"] for case in golden["cases"]]
    assert golden["metric"] == name and golden["reference"] and golden["made_with"]
    assert len(scores) >= 30
    assert sum(score > 0.99 for score in scores) >= 5 and sum(score < 0.01 for score in scores) >= 3


def test_every_metric_of_texts_has_a_table():
    assert set(TABLES.split()) <= GOLDEN.keys()


@pytest.mark.parametrize("name", ["cer", "wer"])
def test_a_rate_of_a_corpus_equals_the_references(name):
    single = [judged(case) for case in GOLDEN[name]["cases"] if len(case["references"]) == 1]
    assert METRICS[name].score(single) == pytest.approx(GOLDEN[name]["corpus"], abs=TOLERANCE, rel=0)
    assert METRICS[name].score(single) != pytest.approx(sum(METRICS[name].score([a]) for a in single) / len(single))
