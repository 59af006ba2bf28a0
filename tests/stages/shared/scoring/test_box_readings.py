"""Which other reading of coordinates an evaluation warns of, and when it is silent."""

import dataclasses
import random

import numpy as np
import pytest

from dataset_builders.contracts.boxes import Box, TrueBoxes
from stages.shared.scoring import box_readings
from stages.shared.scoring.box_readings import MIN_ANSWERS, READINGS, better_reading
from stages.shared.scoring.intervals import Bootstrap
from stages.shared.scoring.metrics.boxes import BoxIoU
from stages.shared.scoring.metrics.contract import Judged

pytestmark = pytest.mark.promise(
    "An evaluation warns where the coordinates of answers fit clearly better in another convention, with both scores, "
    "and not where a model has only learnt nothing."
)

BOOTSTRAP = Bootstrap(resamples=300)
SIZE, RESIZED = (400, 200), (840, 392)
SIDES = {
    "relative_1000": (1000, 1000),
    "resized_pixels": RESIZED,
    "pixels of the original image": SIZE,
    "0 to 1": (1, 1),
    "0 to 1023": (1024, 1024),
}


def some_box(draw: random.Random, smallest: int = 30, largest: int = 90) -> Box:
    width, height = draw.randint(smallest, largest), draw.randint(smallest, largest)
    left, top = draw.uniform(0, SIZE[0] - width), draw.uniform(0, SIZE[1] - height)
    return Box(left, top, left + width, top + height)


def shaken(box: Box, draw: random.Random, pixels: float) -> Box:
    return Box(*(value + draw.gauss(0, pixels) for value in box.corners))


def written(box: Box, reading: str) -> str:
    """Return the four numbers of a box as someone of this reading would write them."""
    sides, _, order = reading.partition(", ")
    across, down = SIDES[sides]
    x1, x2 = (x / SIZE[0] * across for x in (box.x1, box.x2))
    y1, y2 = (y / SIZE[1] * down for y in (box.y1, box.y2))
    numbers = {
        "": (x1, y1, x2, y2),
        "y before x": (y1, x1, y2, x2),
        "x, y, width, height": (x1, y1, x2 - x1, y2 - y1),
        "centre, width, height": ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1),
    }[order]
    return str([round(number, 3 if sides == "0 to 1" else 0) for number in numbers])


def answers_of(boxes: list[list[Box]], texts: list[str], convention: str = "relative_1000") -> list[Judged]:
    return [
        Judged(
            question="Where?",
            references=("",),
            answer=text,
            boxes=TrueBoxes(convention=convention, image=0, size=SIZE, resized=RESIZED, boxes=tuple(each)),
        )
        for each, text in zip(boxes, texts)
    ]


def found(answers: list[Judged]):
    return better_reading(answers, np.arange(len(answers)), BOOTSTRAP)


def boxes_and_draw(seed: int = 0, count: int = 40) -> tuple[list[Box], random.Random]:
    draw = random.Random(seed)
    return [some_box(draw) for _ in range(count)], draw


@pytest.mark.parametrize("convention", ["relative_1000", "resized_pixels"])
@pytest.mark.parametrize("reading", READINGS)
def test_the_reading_in_which_answers_were_written_is_named_with_both_scores(reading, convention):
    boxes, draw = boxes_and_draw()
    texts = [written(shaken(box, draw, 1), reading) for box in boxes]
    answers = answers_of([[box] for box in boxes], texts, convention)
    better = found(answers)
    if reading == convention:
        assert better is None
        return
    assert (better.reading, better.convention) == (reading, convention)
    assert better.reading_iou > 0.85 and better.iou == pytest.approx(BoxIoU().score(answers))
    line = better.line("shapes")
    assert line.startswith(f"shapes: the coordinates of the answers fit better read as {reading}, mean IoU 0.")
    assert f"{better.reading_iou:.3f}, than as {convention}, {better.iou:.3f}," in line and "\n" not in line


def test_many_boxes_of_an_answer_are_read_together_and_labels_are_not_compared():
    draw = random.Random(1)
    boxes = [[some_box(draw) for _ in range(draw.randint(0, 4))] for _ in range(40)]
    texts = ["\n".join(f"thing: {written(box, 'resized_pixels')}" for box in each) or "none" for each in boxes]
    better = found(answers_of(boxes, texts))
    assert better.reading == "resized_pixels" and better.reading_iou > 0.95


def test_readings_that_are_the_same_here_are_named_together():
    boxes, _ = boxes_and_draw()
    answers = answers_of([[box] for box in boxes], [written(box, "pixels of the original image") for box in boxes])
    answers = [dataclasses.replace(a, boxes=dataclasses.replace(a.boxes, resized=SIZE)) for a in answers]
    assert found(answers).reading == "resized_pixels or pixels of the original image"


@pytest.mark.parametrize("seed", range(6))
def test_a_poor_model_of_the_right_convention_is_not_warned_of(seed):
    boxes, draw = boxes_and_draw(seed, 100)
    texts = [written(shaken(box, draw, 5 * (1 + seed)), "relative_1000") for box in boxes]
    assert found(answers_of([[box] for box in boxes], texts)) is None


def test_a_small_gain_is_not_warned_of_however_certain(monkeypatch):
    # 0 to 1014 is a little nearer to 0 to 1023 than to 0 to 1000.
    boxes, _ = boxes_and_draw(count=200)
    monkeypatch.setitem(SIDES, "0 to 1014", (1014, 1014))
    answers = answers_of([[box] for box in boxes], [written(box, "0 to 1014") for box in boxes])
    assert found(answers) is None
    monkeypatch.setattr(box_readings, "MARGIN", 0.001)
    assert found(answers).reading == "0 to 1023"


@pytest.mark.parametrize("seed", range(6))
def test_boxes_that_hit_more_only_by_chance_are_not_warned_of(seed):
    # The answers have nothing to do with the images, but as pixels of the original image they are larger, as the true
    # boxes are.
    draw = random.Random(seed)
    boxes = [[some_box(draw, 90, 180)] for _ in range(100)]
    texts = [written(some_box(draw, 90, 180), "pixels of the original image") for _ in range(100)]
    answers = answers_of(boxes, texts)
    as_pixels = [
        dataclasses.replace(a, boxes=dataclasses.replace(a.boxes, convention="resized_pixels", resized=SIZE))
        for a in answers
    ]
    assert BoxIoU().score(as_pixels) > BoxIoU().score(answers) + 0.1
    assert found(answers) is None


def test_too_few_answers_and_answers_without_boxes_are_not_judged():
    boxes, _ = boxes_and_draw()
    answers = answers_of([[box] for box in boxes], [written(box, "resized_pixels") for box in boxes])
    assert found(answers[:MIN_ANSWERS]) is not None and found(answers[: MIN_ANSWERS - 1]) is None
    assert found(answers_of([[box] for box in boxes], ["no idea"] * 40)) is None
    assert found(answers_of([[]] * 40, ["[1, 2, 3, 4]"] * 40)) is None
    assert found([dataclasses.replace(answer, boxes=None) for answer in answers]) is None
