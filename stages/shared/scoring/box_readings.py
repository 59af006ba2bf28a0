"""Other readings of the coordinates in answers: whether the boxes fit better if the numbers mean something else.

A model that was trained on coordinates of another convention than its answers are read in scores near 0, and so does
one that has learnt nothing. Here the same answers are read in every convention that is in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.shared.chat_format.boxes import read_boxes
from stages.shared.scoring.intervals import Bootstrap, Subset, interval
from stages.shared.scoring.metrics.boxes import BoxIoU, ious_of
from stages.shared.scoring.metrics.contract import Judged

MARGIN = 0.05  # of mean IoU
MIN_ANSWERS = 10
# Name -> (width, height) in the coordinates. Florence's bins, 0 to 999, cannot be told from 0 to 1000.
_SIDES = {
    "relative_1000": lambda true: (1000, 1000),
    "resized_pixels": lambda true: true.resized,
    "pixels of the original image": lambda true: true.size,
    "0 to 1": lambda true: (1, 1),
    "0 to 1023": lambda true: (1024, 1024),  # PaliGemma
}
# Name -> x1, y1, x2, y2 of four numbers.
_ORDERS = {
    "": lambda a, b, c, d: (a, b, c, d),
    ", y before x": lambda a, b, c, d: (b, a, d, c),
    ", x, y, width, height": lambda a, b, c, d: (a, b, a + c, b + d),  # COCO
    ", centre, width, height": lambda a, b, c, d: (a - c / 2, b - d / 2, a + c / 2, b + d / 2),  # YOLO
}
READINGS = tuple(f"{sides}{order}" for sides in _SIDES for order in _ORDERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterReading:
    """A reading in which the answers of a subset fit better than in the model's convention."""

    convention: str  # the model's
    iou: float  # mean IoU in it
    reading: str  # the other; several if they are the same here, as pixels of images that are not resized
    reading_iou: float

    def line(self, subset: str) -> str:
        return (
            f"{subset}: the coordinates of the answers fit better read as {self.reading}, mean IoU "
            f"{self.reading_iou:.3f}, than as {self.convention}, {self.iou:.3f}, which the model is asked for; check "
            "in which convention the training data has them, or set tokenize.boxes.convention to the model's"
        )


def better_reading(answers: Sequence[Judged], groups: np.ndarray, bootstrap: Bootstrap) -> BetterReading | None:
    """Return the reading with the highest mean IoU, if it is clearly higher than that of the model's convention; None
    if there is none, or if fewer than `MIN_ANSWERS` answers have boxes.

    Clearly: the mean IoU is higher by `MARGIN`, and by more than with the true boxes of other answers, since larger
    boxes, say, hit more by chance: the paired interval of that difference is above 0, at a level for as many readings.

    Args:
        groups: (n,) labels; answers with the same label are drawn together.
    """
    rows = [row for row, answer in enumerate(answers) if answer.boxes is not None and answer.boxes.boxes]
    if len(rows) < MIN_ANSWERS:
        return None
    shown = [answers[row] for row in rows]
    # Half a turn away, as the next answer may be about the same image.
    others = shown[len(shown) // 2 :] + shown[: len(shown) // 2]
    means = np.array([_mean_ious(answer, _shares(answer)) for answer in shown])
    chance = np.array([_mean_ious(answer, _shares(other)) for answer, other in zip(shown, others)])
    own = READINGS.index(shown[0].boxes.convention)
    gain, by_chance = means - means[:, [own]], chance - chance[:, [own]]
    total = gain.mean(axis=0)
    level = 1 - (1 - bootstrap.level) / (len(READINGS) - 1)
    strict = Bootstrap(resamples=bootstrap.resamples, level=level, seed=bootstrap.seed)
    clear = []
    for reading in np.flatnonzero(total >= MARGIN):
        table = np.stack([(gain - by_chance)[:, reading], np.ones(len(rows))], axis=1)
        drawn = Subset(metric=BoxIoU(), statistics=table, groups=np.asarray(groups)[rows])  # its value is a mean
        if interval(drawn, strict).low > 0:
            clear.append(reading)
    if not clear:
        return None
    highest = max(total[clear])
    names = [READINGS[reading] for reading in clear if total[reading] == highest]
    ious = means.mean(axis=0)
    return BetterReading(
        convention=READINGS[own],
        iou=float(ious[own]),
        reading=" or ".join(names),
        reading_iou=float(ious[own] + highest),
    )


def _shares(answer: Judged) -> np.ndarray:
    """Return (boxes, 4) the corners of the true boxes, 0 to 1 along each side of the image."""
    return np.array([box.corners for box in answer.boxes.boxes]) / (answer.boxes.size * 2)


def _mean_ious(answer: Judged, wanted: np.ndarray) -> np.ndarray:
    """Return (readings,) the mean over the wanted boxes, (boxes, 4) from 0 to 1, of the highest IoU with a box of the
    answer; labels are ignored."""
    numbers = [corners for corners, _ in read_boxes(answer.answer) or []]
    if not numbers:
        return np.zeros(len(READINGS))
    read = [
        np.array([order(*corners) for corners in numbers]) / (sides(answer.boxes) * 2)
        for sides in _SIDES.values()
        for order in _ORDERS.values()
    ]
    ious = ious_of(np.concatenate(read), wanted)
    return ious.reshape(len(READINGS), len(numbers), -1).max(axis=1).mean(axis=1)
