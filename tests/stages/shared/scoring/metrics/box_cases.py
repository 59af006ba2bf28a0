"""Sets of answers with boxes, and what the metrics give for them, worked out by hand.

Images are 1000 x 1000 pixels, so that coordinates from 0 to 1000 are pixels. `random_sets` makes larger sets, which are
scored by pycocotools alone.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.boxes import Box, TrueBoxes
from stages.shared.scoring.metrics.contract import Judged

BOXES_JSON = Path(__file__).parents[4] / "golden" / "boxes.json"

Given = str | list[Box]  # a text, or boxes that are written as bbox_2d


@dataclass(frozen=True, kw_only=True)
class Case:
    """Answers, each with its true boxes (None: the question has none), and their scores."""

    answers: list[tuple[Given, list[Box] | None]]
    right: int = 0  # matched at IoU 0.5
    given: int = 0
    true: int = 0
    ap50: float = float("nan")  # coco_map50
    ap: float | None = None  # coco_map; None: the same, as no IoU is between 0.5 and 1
    iou: float = float("nan")
    acc: float = float("nan")  # at 0.5
    accs: float | None = None  # at 0.5 to 0.95; None: the same


def a(*corners: float) -> Box:
    return Box(*corners, "a")


def b(*corners: float) -> Box:
    return Box(*corners, "b")


def no(*corners: float) -> Box:
    return Box(*corners)


ONE, OTHER, FAR = a(0, 0, 100, 100), a(200, 0, 300, 100), a(500, 500, 600, 600)
ONE_B = b(0, 0, 100, 100)
HALF = a(0, 0, 100, 50)  # IoU 0.5 with ONE
BELOW = a(0, 0, 100, 49)  # 0.49
EIGHT = a(0, 0, 100, 80)  # 0.8
THIRD = a(50, 0, 150, 100)  # 50 * 100 / (2 * 100 * 100 - 50 * 100)

CUT_OFF = '[{"bbox_2d": [0, 0, 100, 100], "label": "a"}, {"bbox_2d": [200'
CASES: dict[str, Case] = {
    # One box each.
    "equal": Case(answers=[([ONE], [ONE])], right=1, given=1, true=1, ap50=1, iou=1, acc=1),
    "apart": Case(answers=[([FAR], [ONE])], given=1, true=1, ap50=0, iou=0, acc=0),
    "edges that touch": Case(answers=[([a(100, 0, 200, 100)], [ONE])], given=1, true=1, ap50=0, iou=0, acc=0),
    "a half is enough": Case(
        answers=[([HALF], [ONE])], right=1, given=1, true=1, ap50=1, ap=0.1, iou=0.5, acc=1, accs=0.1
    ),
    "just below a half": Case(answers=[([BELOW], [ONE])], given=1, true=1, ap50=0, iou=0.49, acc=0),
    "0.8 is seven of ten": Case(
        answers=[([EIGHT], [ONE])], right=1, given=1, true=1, ap50=1, ap=0.7, iou=0.8, acc=1, accs=0.7
    ),
    "shifted by half": Case(answers=[([THIRD], [ONE])], given=1, true=1, ap50=0, iou=1 / 3, acc=0),
    "a quarter inside": Case(answers=[([a(25, 25, 75, 75)], [ONE])], given=1, true=1, ap50=0, iou=0.25, acc=0),
    "all of the image": Case(answers=[([a(0, 0, 1000, 1000)], [ONE])], given=1, true=1, ap50=0, iou=0.01, acc=0),
    "half a pixel": Case(
        answers=[([a(0.5, 0, 100.5, 100)], [ONE])], right=1, given=1, true=1, ap50=1, iou=99.5 / 100.5, acc=1
    ),
    "two answers, one right": Case(
        answers=[([ONE], [ONE]), ([FAR], [ONE])], right=1, given=2, true=2, ap50=51 / 101, iou=0.5, acc=0.5
    ),
    # Labels: the field's scores of one box ignore them.
    "wrong label": Case(answers=[([ONE_B], [ONE])], given=1, true=1, ap50=0, iou=1, acc=1),
    "no label": Case(answers=[([no(0, 0, 100, 100)], [ONE])], given=1, true=1, ap50=0, iou=1, acc=1),
    "label in capitals": Case(
        answers=[([Box(0, 0, 100, 100, " A ")], [ONE])], right=1, given=1, true=1, ap50=1, iou=1, acc=1
    ),
    "a label where the truth has none": Case(
        answers=[([ONE], [no(0, 0, 100, 100)])], right=1, given=1, true=1, ap50=1, iou=1, acc=1
    ),
    "labels swapped": Case(
        answers=[([b(0, 0, 100, 100), a(200, 0, 300, 100)], [ONE, b(200, 0, 300, 100)])], given=2, true=2, ap50=0
    ),
    "the right label among wrong ones": Case(
        answers=[([ONE_B, ONE], [ONE])], right=1, given=2, true=1, ap50=1, iou=1, acc=1
    ),
    "two labels, one found": Case(answers=[([ONE], [ONE, ONE_B])], right=1, given=1, true=2, ap50=0.5),
    "a label that no truth has": Case(
        answers=[([Box(0, 0, 9, 9, "c"), ONE], [ONE])], right=1, given=2, true=1, ap50=1, iou=0.0081, acc=0
    ),
    # Empty.
    "nothing answered": Case(answers=[("[]", [ONE])], true=1, ap50=0, iou=0, acc=0),
    "none answered": Case(answers=[("none", [ONE])], true=1, ap50=0, iou=0, acc=0),
    "not parsed": Case(answers=[("a cat", [ONE])], true=1, ap50=0, iou=0, acc=0),
    "an empty text": Case(answers=[("", [ONE])], true=1, ap50=0, iou=0, acc=0),
    "nothing there, nothing answered": Case(answers=[("[]", [])]),
    "nothing there, not parsed": Case(answers=[("a cat", [])]),
    "nothing there, one answered": Case(answers=[([ONE], [])], given=1),
    "nothing there in one of two": Case(
        answers=[("[]", []), ([ONE], [ONE])], right=1, given=1, true=1, ap50=1, iou=1, acc=1
    ),
    "something answered where nothing is, first": Case(
        answers=[([ONE], []), ([ONE], [ONE])], right=1, given=2, true=1, ap50=0.5, iou=1, acc=1
    ),
    "something answered where nothing is, last": Case(
        answers=[([ONE], [ONE]), ([ONE], [])], right=1, given=2, true=1, ap50=1, iou=1, acc=1
    ),
    "no true boxes at all": Case(answers=[([ONE], None), ("a cat", None)]),
    "one question without boxes": Case(
        answers=[([ONE], None), ([ONE], [ONE])], right=1, given=1, true=1, ap50=1, iou=1, acc=1
    ),
    # Duplicates: a true box is found once.
    "twice the same": Case(answers=[([ONE, ONE], [ONE])], right=1, given=2, true=1, ap50=1, iou=1, acc=1),
    "three times": Case(answers=[([ONE] * 3, [ONE, FAR])], right=1, given=3, true=2, ap50=51 / 101),
    "twice in the truth": Case(answers=[([ONE], [ONE, ONE])], right=1, given=1, true=2, ap50=51 / 101),
    "twice in both": Case(answers=[([ONE, ONE], [ONE, ONE])], right=2, given=2, true=2, ap50=1),
    "a duplicate before the second": Case(
        answers=[([ONE, ONE, FAR], [ONE, FAR])], right=2, given=3, true=2, ap50=(51 + 50 * 2 / 3) / 101
    ),
    # Order.
    "another order is right": Case(answers=[([FAR, OTHER, ONE], [ONE, OTHER, FAR])], right=3, given=3, true=3, ap50=1),
    "a wrong one first": Case(answers=[([FAR, ONE], [ONE])], right=1, given=2, true=1, ap50=0.5, iou=0, acc=0),
    "a wrong one last": Case(answers=[([ONE, FAR], [ONE])], right=1, given=2, true=1, ap50=1, iou=1, acc=1),
    "a wrong answer first": Case(
        answers=[([FAR], [ONE]), ([ONE], [ONE])], right=1, given=2, true=2, ap50=51 / 101 / 2, iou=0.5, acc=0.5
    ),
    "wrong, right, wrong, right": Case(
        answers=[([FAR, ONE, FAR, OTHER], [ONE, OTHER])], right=2, given=4, true=2, ap50=0.5
    ),
    # IoU 0.8 and 80/110, 1 and 100/110: to 0.8 both are right, then only the second.
    "the first takes the best": Case(
        answers=[([EIGHT, ONE], [ONE, a(0, 0, 100, 110)])],
        right=2,
        given=2,
        true=2,
        ap50=1,
        ap=(7 + 3 * 51 / 101 / 2) / 10,
    ),
    # IoU 70/80 and 0.7, 50/80 and 0.5: from 0.55 on the second has nothing left, though it could have 50/80.
    "the first takes what only the second needs": Case(
        answers=[([a(0, 0, 100, 70), HALF], [a(0, 0, 100, 80), ONE])],
        right=2,
        given=2,
        true=2,
        ap50=1,
        ap=(1 + 7 * 51 / 101) / 10,
    ),
    # IoU 80/120 with both, so it takes the second, which the next answer equals.
    "the last of equals": Case(
        answers=[([a(20, 0, 120, 100), a(40, 0, 140, 100)], [ONE, a(40, 0, 140, 100)])],
        right=1,
        given=2,
        true=2,
        ap50=51 / 101,
        ap=(4 + 6 / 2) / 10 * 51 / 101,
    ),
    # Degenerate.
    "no width": Case(answers=[([a(50, 0, 50, 100)], [ONE])], given=1, true=1, ap50=0, iou=0, acc=0),
    "a point": Case(answers=[([a(5, 5, 5, 5)], [ONE])], given=1, true=1, ap50=0, iou=0, acc=0),
    "corners swapped": Case(answers=[([a(100, 100, 0, 0)], [ONE])], given=1, true=1, ap50=0, iou=0, acc=0),
    "left and right swapped": Case(answers=[([a(100, 0, 0, 100)], [ONE])], given=1, true=1, ap50=0, iou=0, acc=0),
    "beyond the image": Case(
        answers=[([a(-100, 0, 100, 100)], [ONE])], right=1, given=1, true=1, ap50=1, ap=0.1, iou=0.5, acc=1, accs=0.1
    ),
    "swapped, then right": Case(
        answers=[([a(100, 100, 0, 0), ONE], [ONE])], right=1, given=2, true=1, ap50=0.5, iou=0, acc=0
    ),
    # Many.
    "a hundred and one wrong, then right": Case(
        answers=[([FAR] * 101 + [ONE], [ONE])], right=1, given=102, true=1, ap50=0, iou=0, acc=0
    ),
    "cut off": Case(answers=[(CUT_OFF, [ONE, OTHER])], right=1, given=1, true=2, ap50=51 / 101),
    "three of four in two answers": Case(
        answers=[([ONE, OTHER], [ONE, OTHER]), ([FAR, ONE], [OTHER, ONE])],
        right=3,
        given=4,
        true=4,
        ap50=(51 + 25 * 3 / 4) / 101,
    ),
}


def random_sets() -> list[list[tuple[Given, list[Box] | None]]]:
    """Return sets of 30 answers whose boxes lie on a grid, so that many IoUs are equal or at a threshold; every other
    set is scored mostly right."""
    sets = []
    for seed in range(12):
        draw = random.Random(seed)

        def box(draw: random.Random = draw) -> Box:
            left, top = draw.randrange(0, 160, 20), draw.randrange(0, 160, 20)
            return Box(
                left, top, left + draw.randrange(20, 120, 20), top + draw.randrange(20, 120, 20), draw.choice("aabc")
            )

        answers = []
        for _ in range(30):
            true = [box() for _ in range(draw.randrange(5))]
            near = [
                Box(t.x1, t.y1, t.x2 + draw.choice((0, 0, 10)), t.y2 + draw.choice((0, 0, 20)), t.label) for t in true
            ]
            given = [near[i] if seed % 2 and draw.random() < 0.8 else box() for i in range(len(true))]
            given += [box() for _ in range(draw.randrange(3))]
            draw.shuffle(given)
            answers.append((given, true))
        sets.append(answers)
    return sets


def read(given: Given) -> list[Box]:
    """Return the boxes that an answer of a case states."""
    return given if isinstance(given, list) else [ONE] if given == CUT_OFF else []


def judged(given: Given, true: list[Box] | None) -> Judged:
    text = (
        given if isinstance(given, str) else json.dumps([{"bbox_2d": box.corners, "label": box.label} for box in given])
    )
    sides = (1000, 1000)
    boxes = None
    if true is not None:
        boxes = TrueBoxes(convention="relative_1000", image=0, size=sides, resized=sides, boxes=tuple(true))
    return Judged(question="Where?", references=("",), answer=text, boxes=boxes)
