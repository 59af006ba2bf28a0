"""Scores of receipts, number by number against Donut's evaluator."""

import json
import random
from functools import cache

import numpy as np
import pytest

from dataset_builders.errors import InputError
from dataset_builders.sources.cord_target import NoTagForm, to_json, to_tags
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.cord import CordFieldF1, CordTreeEdit, _change, _nodes, read_receipt, tree_distance
from tests.stages.shared.scoring.metrics.cord_cases import CORD_JSON, ONE, RECEIPTS, SUB, TWO

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

RECORDED = json.loads(CORD_JSON.read_text())
EXACT = {"abs": 1e-6, "rel": 0}


def judged(answer: str, *references: str) -> Judged:
    return Judged(question="Read the receipt.", references=references, answer=answer)


ALL = [judged(to_json(predicted), to_json(wanted)) for predicted, wanted in RECEIPTS]


def test_there_are_enough_cases():
    for name in ("cord_nted", "cord_f1"):
        assert len(RECORDED[name]) == len(RECEIPTS) >= 30
        assert len({round(score, 6) for score in RECORDED[name] if 0 < score < 1}) >= 10


@pytest.mark.parametrize("metric", [CordTreeEdit(), CordFieldF1()], ids=lambda metric: metric.name)
def test_each_receipt_scores_as_donut_has_it(metric):
    assert [metric.score([one]) for one in ALL] == pytest.approx(RECORDED[metric.name], **EXACT)


def test_all_receipts_score_as_donut_has_it():
    assert CordTreeEdit().score(ALL) == pytest.approx(np.mean(RECORDED["cord_nted"]), **EXACT)
    assert CordFieldF1().score(ALL) == pytest.approx(RECORDED["all"]["cord_f1"], **EXACT)


def test_both_target_forms_score_alike():
    compared = 0
    for at, (predicted, wanted) in enumerate(RECEIPTS):
        try:
            tags = to_tags(predicted), to_tags(wanted)
        except NoTagForm:
            continue
        for metric in (CordTreeEdit(), CordFieldF1()):
            rows = metric.statistics([ALL[at]])
            np.testing.assert_array_equal(metric.statistics([judged(*tags)]), rows)
            np.testing.assert_array_equal(metric.statistics([judged(tags[0], to_json(wanted))]), rows)
            assert not metric.unparsed([judged(*tags)])[0]
        compared += 1
    assert compared >= 30


# Results of Donut that differ from ours: (prediction, reference, its accuracy, its F1, ours, ours); None if it raises.
DIFFERENT = [
    # An empty reference: 0 / 0 is its max(0, nan) = 0, and its F1 divides by 0.
    ({}, {}, 0.0, None, 1.0, float("nan")),
    ({"menu": {}}, {"menu": []}, 0.0, None, 1.0, float("nan")),
    # A text that contains Donut's mark of a leaf: Donut removes the mark from the text, so the two are equal in its
    # tree.
    ({"a": "<leaf>b"}, {"a": "b"}, 1.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("predicted", "wanted", "accuracy", "f1", "our_accuracy", "our_f1"), DIFFERENT)
def test_where_donut_differs(predicted, wanted, accuracy, f1, our_accuracy, our_f1):
    answer = judged(to_json(predicted), to_json(wanted))
    assert CordTreeEdit().score([answer]) == our_accuracy
    assert CordFieldF1().score([answer]) == pytest.approx(our_f1, nan_ok=True)
    assert (our_accuracy, our_f1) != (accuracy, f1)


def test_where_vlmevalkit_differs():
    # kie_evaluator.py: cal_f1_all divides by tp + (fp + fn) / 2 + 1e-6, and counts null as the text "None".
    assert CordFieldF1().score([ALL[0]]) == 1.0 != 3 / (3 + 1e-6)
    assert CordFieldF1().score([judged('{"a":"1","b":null}', '{"a":"1"}')]) == 1.0 != 1 / (1 + 1 / 2 + 1e-6)


NO_RECEIPTS = [
    "",
    "I cannot read this receipt.",
    "9.000",
    "null",
    '"text"',
    '{"menu": {"nm": "Nasi"',
    '{"menu": 1, "menu": 2}',
    "<s_menu><s_nm>Nasi</s_nm>",
    "<s_menu>Nasi</s_total>",
    "text <s_menu>Nasi</s_menu>",
    "[" * 100_000,
    '{"a":NaN}',
]


@pytest.mark.parametrize("text", NO_RECEIPTS, ids=lambda text: text[:20])
def test_what_is_no_receipt_scores_as_an_empty_one(text):
    answer, empty = judged(text, to_json(TWO)), judged("{}", to_json(TWO))
    for metric in (CordTreeEdit(), CordFieldF1()):
        assert metric.unparsed([answer, empty]).tolist() == [True, False]
        np.testing.assert_array_equal(metric.statistics([answer]), metric.statistics([empty]))
        assert metric.score([answer]) == 0.0


@pytest.mark.parametrize(
    "form", ["```json\n{}\n```", "Here it is:\n```\n{}\n```\nAnything else?", "```json\n{}", "  {}\n"]
)
@pytest.mark.parametrize("write", [to_json, to_tags])
def test_a_receipt_is_found_in_a_code_fence_and_between_spaces(form, write):
    assert read_receipt(form.replace("{}", write(TWO))) == read_receipt(to_json(TWO)) is not None


def test_the_best_reference_counts():
    answer = judged(to_json(ONE), to_json(TWO), to_json(ONE), to_json(SUB))
    assert CordTreeEdit().score([answer]) == 1.0
    assert CordFieldF1().statistics([answer]).tolist() == [[3, 0, 0]]


def test_a_reference_that_is_no_receipt_is_the_users_error():
    for metric in (CordTreeEdit(), CordFieldF1()):
        with pytest.raises(InputError, match=r"the reference 'Nasi' is not a receipt; .* another metric"):
            metric.statistics([judged(to_json(ONE), "Nasi")])


def test_scores_of_fields_add_up_to_the_whole():
    found = CordFieldF1().fields(ALL)
    rows = [[score[name] for name in CordFieldF1.columns] for score in found.values()]
    np.testing.assert_array_equal(np.sum(rows, axis=0), CordFieldF1().statistics(ALL).sum(axis=0))
    assert list(found) == sorted(found) and "menu.sub.nm" in found


def test_scores_of_fields_by_hand():
    predicted = {"menu": [{"nm": "a", "cnt": "1"}, {"nm": "b", "cnt": "9"}], "total": {"x": "1"}}
    wanted = {"menu": [{"nm": "a", "cnt": "1"}, {"nm": "c", "cnt": "2"}, {"nm": "d"}], "sub": {"y": "1"}}
    found = CordFieldF1().fields([judged(to_json(predicted), to_json(wanted))])
    assert {path: score["f1"] for path, score in found.items()} == {
        "menu.cnt": 1 / 2,
        "menu.nm": 1 / (1 + 3 / 2),
        "sub.y": 0.0,
        "total.x": 0.0,
    }
    assert CordFieldF1().fields([judged("{}", "{}")]) == {}


def test_f1_is_over_all_fields_and_nothing_is_no_number():
    rows = CordFieldF1().statistics([ALL[0], ALL[4]])
    assert CordFieldF1().value(rows.sum(axis=0)) == 3 / (3 + 11 / 2)
    assert np.isnan(CordFieldF1().value(np.zeros(3)))
    assert CordFieldF1().value(np.zeros((4, 2, 3))).shape == (4, 2)
    assert CordFieldF1().statistics([]).shape == (0, 3) and CordTreeEdit().statistics([]).shape == (0, 2)


def plain_distance(one: list, two: list) -> int:
    """Return the tree distance by its definition: of two forests, the last roots are deleted, inserted or changed."""

    @cache
    def forests(start: int, end: int, first: int, last: int) -> int:
        if start == end:
            return sum(node.weight for node in two[first:last])
        if first == last:
            return sum(node.weight for node in one[start:end])
        left, right = one[end - 1], two[last - 1]
        below, beneath = max(start, left.first), max(first, right.first)
        return min(
            forests(start, end - 1, first, last) + left.weight,
            forests(start, end, first, last - 1) + right.weight,
            forests(start, below, first, beneath) + forests(below, end - 1, beneath, last - 1) + _change(left, right),
        )

    return forests(0, len(one), 0, len(two))


def test_the_tree_distance_is_that_of_its_definition():
    choose = random.Random(0)

    def tree(depth: int):
        if depth == 3 or choose.random() < 0.25:
            return "".join(choose.choice("ab") for _ in range(choose.randint(0, 3)))
        if choose.random() < 0.3:
            return [{"x": tree(depth + 1)} for _ in range(choose.randint(1, 2))]
        return {key: tree(depth + 1) for key in "pqrs" if choose.random() < 0.6}

    distances = set()
    for _ in range(60):
        one, two = (_nodes(read_receipt(to_json({"menu": tree(1), "total": tree(1)}))) for _ in range(2))
        assert tree_distance(one, two) == plain_distance(one, two)
        distances.add(tree_distance(one, two))
    assert len(distances) > 8
