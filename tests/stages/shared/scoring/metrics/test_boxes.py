"""Scores of boxes: number by number by hand and against pycocotools, and the bootstrap of COCO's mAP."""

import dataclasses
import json

import numpy as np
import pytest

from dataset_builders.contracts.boxes import Box, TrueBoxes
from stages.shared.scoring.intervals import Bootstrap, Subset, difference, interval
from stages.shared.scoring.metrics.boxes import CocoMap, CocoMap50, ious_of
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.subsets import METRICS
from tests.stages.shared.scoring.metrics.box_cases import BOXES_JSON, CASES, FAR, ONE, OTHER, judged, random_sets

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

RECORDED = json.loads(BOXES_JSON.read_text())["scores"]
SETS = {name: case.answers for name, case in CASES.items()}
SETS |= {f"random {number}": answers for number, answers in enumerate(random_sets())}
ANSWERS = {name: [judged(*answer) for answer in answers] for name, answers in SETS.items()}
EXACT = {"abs": 1e-12, "rel": 0, "nan_ok": True}
BOX_METRICS = [name for name in METRICS if name.startswith(("iou", "acc_iou", "box_", "coco_"))]


def score(metric: str, answers: list[Judged]) -> float:
    return METRICS[metric].score(answers)


def test_there_are_enough_cases():
    assert len(CASES) >= 50 and RECORDED.keys() == ANSWERS.keys()
    assert len({round(each["coco_map"], 6) for each in RECORDED.values() if each["coco_map"] not in (None, 0)}) >= 15


@pytest.mark.parametrize("name", CASES)
def test_each_case_scores_as_by_hand(name):
    case, answers = CASES[name], ANSWERS[name]
    share = {number: case.right / number if number else np.nan for number in (case.given, case.true)}
    both = case.given + case.true
    expected = {
        "box_precision": share[case.given],
        "box_recall": share[case.true],
        "box_f1": 2 * case.right / both if both else np.nan,
        "coco_map50": case.ap50,
        "coco_map": case.ap50 if case.ap is None else case.ap,
        "iou": case.iou,
        "acc_iou50": case.acc,
        "acc_iou50_95": case.acc if case.accs is None else case.accs,
    }
    assert expected.keys() == set(BOX_METRICS)
    assert {metric: score(metric, answers) for metric in expected} == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("name", ANSWERS)
def test_each_set_scores_as_pycocotools_has_it(name):
    recorded, answers = RECORDED[name], ANSWERS[name]
    for metric in ("coco_map", "coco_map50"):
        expected = np.nan if recorded[metric] is None else recorded[metric]
        assert score(metric, answers) == pytest.approx(expected, **EXACT)
    if name != "a hundred and one wrong, then right":  # COCO counts 100 detections
        assert METRICS["box_f1"].statistics(answers)[:, 0].sum() == recorded["right"]


def test_the_score_of_each_answer_is_that_of_the_answer_alone():
    answers = [*ANSWERS["random 1"], *ANSWERS["nothing there, nothing answered"], *ANSWERS["no true boxes at all"]]
    for name in BOX_METRICS:
        rows = METRICS[name].each(METRICS[name].statistics(answers))
        alone = [score(name, [answer]) for answer in answers]
        if name.startswith("box_"):  # a right "nothing" is right, and adds nothing to sums
            right_nothing = [at for at, answer in enumerate(answers) if answer.boxes and not answer.boxes.boxes]
            right_nothing = [at for at in right_nothing if answers[at].answer == "[]"]
            assert right_nothing and np.isnan([alone[at] for at in right_nothing]).all()
            alone = [1.0 if at in right_nothing else one for at, one in enumerate(alone)]
        assert rows == pytest.approx(alone, **EXACT), name


def test_an_answer_of_no_form_is_counted_where_boxes_are_asked_for():
    answers = [
        judged(given, true) for given, true in [([ONE], [ONE]), ("a cat", [ONE]), ("a cat", []), ("a cat", None)]
    ]
    for name in BOX_METRICS:
        assert METRICS[name].unparsed(answers).tolist() == [False, True, True, False]


def test_answers_are_read_in_the_convention_of_the_model_and_in_pixels_of_the_image_as_shown():
    true = TrueBoxes(
        convention="relative_1000", image=0, size=(400, 200), resized=(800, 100), boxes=(Box(40, 20, 80, 60),)
    )
    relative = Judged(question="?", references=("",), answer="[100, 100, 200, 300]", boxes=true)
    own = dataclasses.replace(true, convention="resized_pixels")
    resized = Judged(question="?", references=("",), answer="[80, 10, 160, 30]", boxes=own)
    assert score("iou", [relative]) == score("iou", [resized]) == 1
    assert score("iou", [dataclasses.replace(relative, boxes=own)]) < 0.1


def test_iou_is_that_of_pixels_counted_one_by_one():
    boxes = np.random.default_rng(1).integers(0, 12, (60, 4))
    grid = np.stack(np.meshgrid(np.arange(12), np.arange(12)), axis=-1) + 0.5
    inside = ((grid > boxes[:, None, None, :2]) & (grid < boxes[:, None, None, 2:])).all(axis=-1).reshape(60, -1)
    common, union = (inside[:, None] & inside).sum(axis=-1), (inside[:, None] | inside).sum(axis=-1)
    np.testing.assert_allclose(ious_of(boxes, boxes), common / np.maximum(union, 1), atol=1e-12)


def drawn(answers: list[Judged], times: list[int]) -> list[Judged]:
    """Return each answer as often as it is drawn, its copies in a row."""
    return [answer for answer, number in zip(answers, times) for _ in range(number)]


@pytest.mark.parametrize("metric", [CocoMap(), CocoMap50()], ids=lambda metric: metric.name)
def test_a_drawn_answer_counts_as_often_as_it_is_drawn(metric):
    # Of one detection each, so that the copies of a detection and of an answer stand in the same order.
    answers = [judged(given[:1], true) for given, true in SETS["random 1"]]
    times = np.random.default_rng(2).multinomial(6, [1 / 30] * 30, size=40)
    found = metric.weighted(metric.statistics(answers), times.astype(float))
    assert found == pytest.approx([metric.score(drawn(answers, row)) for row in times], **EXACT)
    assert len({*found.tolist()}) > 10


def test_the_answers_of_a_group_are_drawn_together():
    metric, answers = CocoMap(), ANSWERS["random 3"]
    groups = np.random.default_rng(4).integers(0, 7, 30)
    statistics = metric.statistics(answers)
    by_group = metric.grouped(statistics, groups, 7)
    times = np.random.default_rng(3).integers(0, 3, (20, 7)).astype(float)
    assert metric.weighted(by_group, times) == pytest.approx(metric.weighted(statistics, times[:, groups]), **EXACT)
    assert len(by_group) == 7 and metric.total(by_group) == metric.total(statistics)


def test_coco_map_has_an_interval_and_a_paired_difference():
    metric, bootstrap = CocoMap(), Bootstrap(resamples=500)
    more = [judged(given, [ONE, FAR]) for given in [[ONE, FAR], [ONE], [OTHER], [ONE, FAR]] * 10]
    less = [judged(given, [ONE, FAR]) for given in [[ONE], [ONE], [OTHER], [FAR]] * 10]
    before, after = (Subset(metric=metric, statistics=metric.statistics(answers)) for answers in (less, more))
    found = difference(before, after, bootstrap)
    assert found.excludes_zero and 0 < found.low < found.difference < found.high < 0.7
    assert (found.wins, found.losses, found.ties) == (20, 0, 20)
    for subset in (before, after):
        one = interval(subset, bootstrap)
        assert one.low < one.value < one.high
