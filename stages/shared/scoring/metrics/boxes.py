"""Scores of boxes: IoU and accuracy of one box, precision, recall and F1 of many, and COCO's mAP.

An answer is read by `read_boxes`, whatever form it has, and in the model's convention; true boxes and answers are
compared in pixels of the image as shown. An answer that does not parse counts as no boxes, and is `unparsed`. An answer
to a question without true boxes (`Judged.boxes` is None) is in no score.

Labels are compared without regard to case and white space, where an answer's true boxes have any. IoU and accuracy,
which the field computes for one box that a text describes, ignore them.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataset_builders.contracts.boxes import Box
from stages.shared.chat_format.boxes import read_boxes
from stages.shared.scoring.metrics.contract import Judged, MeanMetric, Metric, SumMetric
from stages.shared.scoring.metrics.texts import normalize

# As pycocotools makes them: 0.6000000000000001 and other numbers decide at equality.
THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
_MAX_DETECTIONS = 100  # of each label and image


def answered_boxes(answer: Judged) -> list[Box]:
    """Return the boxes of an answer in pixels of the image as shown, neither sorted nor cut to the image; none if it
    does not parse. The answer must have true boxes."""
    found = read_boxes(answer.answer) or []
    return [Box(*answer.boxes.as_shown(corners), normalize(label)) for corners, label in found]


def ious_of(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> np.ndarray:
    """Return (len(first), len(second)) float64: intersection over union of boxes given as x1, y1, x2, y2. A box whose
    corners are not upper left and lower right has no area."""
    one = np.asarray(first, np.float64).reshape(-1, 1, 4)
    two = np.asarray(second, np.float64).reshape(1, -1, 4)
    sides = np.minimum(one[..., 2:], two[..., 2:]) - np.maximum(one[..., :2], two[..., :2])
    common = np.maximum(sides, 0).prod(axis=-1)
    union = sum((boxes[..., 2:] - boxes[..., :2]).prod(axis=-1) for boxes in (one, two)) - common
    return np.divide(common, union, out=np.zeros_like(common), where=common > 0)


def matched(ious: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return (thresholds, detections) bool: which detections are right, as COCO matches them.

    Each detection, in order, takes the free true box with the highest IoU, the last of equals, if that reaches the
    threshold.

    Args:
        ious: (detections, true boxes).
    """
    hits = np.zeros((len(thresholds), len(ious)), bool)
    if not ious.size:
        return hits
    taken = np.zeros((len(thresholds), ious.shape[1]), bool)
    for place, row in enumerate(ious):
        free = np.where(taken, -1.0, row)
        best = row.size - 1 - free[:, ::-1].argmax(axis=1)
        each = np.arange(len(thresholds))
        hits[:, place] = free[each, best] >= thresholds
        taken[each, best] |= hits[:, place]
    return hits


class _BoxMetric(Metric):
    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        return np.array([answer.boxes is not None and read_boxes(answer.answer) is None for answer in answers], bool)


class BoxIoU(_BoxMetric, MeanMetric):
    """The mean IoU of answers with one true box."""

    name = "iou"
    definition = (
        "intersection over union of the true box and the first box of the answer, 0 without one; the mean over answers "
        "with one true box"
    )
    source = (
        "Yu et al. 2016, arXiv 1608.00272; lmms-eval 0.7.3 tasks/refcoco/utils_rec.py takes the first box too, and "
        "reads it in two conventions, of which it keeps the higher IoU; ours knows the model's"
    )

    def score_one(self, answer: Judged) -> float:
        first = answered_boxes(answer)[:1]
        return float(ious_of([box.corners for box in first], [answer.boxes.boxes[0].corners]).sum())

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        # Not the rows of MeanMetric: other answers than those with one true box have no score.
        are_single = [answer.boxes is not None and len(answer.boxes.boxes) == 1 for answer in answers]
        rows = [(self.score_one(a), 1.0) if single else (0.0, 0.0) for a, single in zip(answers, are_single)]
        return np.array(rows).reshape(-1, 2)


class BoxAccuracy(BoxIoU):
    """The share of answers whose box is right."""

    name = "acc_iou50"
    definition = "1 where iou is at least 0.5, else 0; the mean over answers with one true box"
    source = "Yu et al. 2016, arXiv 1608.00272, as RefCOCO is scored: lmms-eval 0.7.3 tasks/refcoco/utils_rec.py"
    thresholds = THRESHOLDS[:1]

    def score_one(self, answer: Judged) -> float:
        return float(np.mean(super().score_one(answer) >= self.thresholds))


class BoxAccuracies(BoxAccuracy):
    """The share of answers whose box is right, at stricter and stricter thresholds."""

    name = "acc_iou50_95"
    definition = "the mean of the accuracies at IoU 0.5, 0.55 ... 0.95, as acc_iou50"
    source = "the thresholds of COCO's mAP (Lin et al. 2014, arXiv 1405.0312)"
    thresholds = THRESHOLDS


class _BoxCounts(_BoxMetric, SumMetric):
    """Scores from the numbers of right, answered and true boxes of all answers together."""

    columns = ("right", "answered", "true", "empty")  # empty: nothing is there, and the answer says so
    source = (
        "the matches at IoU 0.5 of pycocotools 2.0.11 cocoeval.py evaluateImg with equal scores, without its limit of "
        "100 detections; all labels together"
    )

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        rows = np.zeros((len(answers), 4))
        for row, (answer, pairs) in zip(rows, zip(answers, _by_label(answers))):
            for ious in pairs.values():
                row[:3] += matched(ious, THRESHOLDS[:1]).sum(), *ious.shape
            if answer.boxes is not None and not answer.boxes.boxes:
                row[3] = read_boxes(answer.answer) == []
        return rows

    def value(self, sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[..., 0] / self._of(sums)

    def each(self, statistics: np.ndarray) -> np.ndarray:
        # Alone, an answer that finds nothing where nothing is is right; over several it adds 0 to every sum.
        return np.where(statistics[:, 3] > 0, 1.0, self.value(statistics))

    @abstractmethod
    def _of(self, sums: np.ndarray) -> np.ndarray:
        """Return (...) the number of which the right boxes are a share."""


class BoxPrecision(_BoxCounts):
    name = "box_precision"
    definition = "the share of all answered boxes that match a true box of their label at IoU 0.5, each one once"

    def _of(self, sums: np.ndarray) -> np.ndarray:
        return sums[..., 1]


class BoxRecall(_BoxCounts):
    name = "box_recall"
    definition = "the share of all true boxes that an answered box of their label matches at IoU 0.5, each one once"

    def _of(self, sums: np.ndarray) -> np.ndarray:
        return sums[..., 2]


class BoxF1(_BoxCounts):
    name = "box_f1"
    definition = "2 right / (answered + true) over all answers' boxes, matched as for box_precision and box_recall"

    def _of(self, sums: np.ndarray) -> np.ndarray:
        return (sums[..., 1] + sums[..., 2]) / 2


@dataclass(frozen=True, slots=True)
class _OfLabel:
    """The detections of one label, in the order of the answers, and its true boxes."""

    answer: np.ndarray  # (detections,) number of the answer, or group, of each detection
    hits: np.ndarray  # (thresholds, detections) whether it is right
    true: np.ndarray  # (n,) number of true boxes of each answer, or group


@dataclass(frozen=True, slots=True)
class _Detections:
    length: int
    labels: list[_OfLabel]  # of the labels that true boxes have

    def __len__(self) -> int:
        return self.length


class CocoMap(_BoxMetric):
    name = "coco_map"
    definition = (
        "COCO's AP: precision at 101 recalls, interpolated; its mean over labels of true boxes and over IoU 0.5, 0.55 "
        "... 0.95. All scores are 1.0, so detections stand in the order of the answers; each answer is an image"
    )
    source = (
        "pycocotools 2.0.11 cocoeval.py, stats[0], with a box of width or height below 0 as one of 0; lmms-eval issue "
        "1375 for the scores. As there, boxes of a label that no true box has are not counted; box_f1 counts them"
    )
    thresholds = THRESHOLDS

    def statistics(self, answers: Sequence[Judged]) -> _Detections:
        count, pairs_of = len(answers), _by_label(answers)
        labels = sorted({label for pairs in pairs_of for label, ious in pairs.items() if ious.shape[1]})
        of_labels = []
        for label in labels:
            numbers, hits, true = [], [np.zeros((len(self.thresholds), 0), bool)], np.zeros(count)
            for number, pairs in enumerate(pairs_of):
                if label in pairs:
                    ious = pairs[label][:_MAX_DETECTIONS]
                    true[number] = ious.shape[1]
                    numbers += [number] * len(ious)
                    hits.append(matched(ious, self.thresholds))
            of_labels.append(_OfLabel(np.array(numbers, np.intp), np.concatenate(hits, axis=1), true))
        return _Detections(count, of_labels)

    def grouped(self, statistics: _Detections, groups: np.ndarray, count: int) -> _Detections:
        """The detections keep their order, also where the answers of a group are apart."""
        labels = [
            replace(each, answer=groups[each.answer], true=np.bincount(groups, each.true, minlength=count))
            for each in statistics.labels
        ]
        return _Detections(count, labels)

    def weighted(self, statistics: _Detections, weights: np.ndarray) -> np.ndarray:
        """A detection that is drawn three times stands three times in a row."""
        sums, labels = np.zeros(len(weights)), np.zeros(len(weights))
        for each in statistics.labels:
            true = weights @ each.true
            all_so_far = weights.take(each.answer, axis=1).cumsum(axis=1)
            # Computed once for each number of right and of true boxes, as the same numbers come again and again.
            numbers, which = np.unique(true, return_inverse=True)
            reached_of = _num_reached(np.arange(numbers[-1] + 1) / np.maximum(numbers, 1)[:, None])
            for hits in each.hits:
                places = np.flatnonzero(hits)  # recall and interpolated precision change at right detections only
                right = weights.take(each.answer[places], axis=1).cumsum(axis=1)
                reached = reached_of[which[:, None], right.astype(np.intp)]
                sums += _average_precision(right, all_so_far.take(places, axis=1), reached)
            labels += true > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums / (labels * len(self.thresholds))

    def each(self, statistics: _Detections) -> np.ndarray:
        sums, labels = np.zeros(len(statistics)), np.zeros(len(statistics))
        for each in statistics.labels:
            for number in np.flatnonzero(each.true):
                first, end = np.searchsorted(each.answer, (number, number + 1))
                right = each.hits[:, first:end].cumsum(axis=1)
                all_so_far = np.broadcast_to(np.arange(1, end - first + 1), right.shape)
                sums[number] += _average_precision(right, all_so_far, _num_reached(right / each.true[number])).sum()
                labels[number] += 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums / (labels * len(self.thresholds))


class CocoMap50(CocoMap):
    name = "coco_map50"
    definition = "coco_map at IoU 0.5 alone"
    source = "pycocotools 2.0.11 cocoeval.py, stats[1], as coco_map"
    thresholds = THRESHOLDS[:1]


def _num_reached(recalls: np.ndarray) -> np.ndarray:
    """Return how many of the 101 recalls each recall reaches."""
    # Compared as floats, as pycocotools does: 57 of 100 do not reach the recall 0.57.
    return np.searchsorted(_RECALLS, recalls.ravel(), side="right").reshape(recalls.shape)


def _average_precision(right: np.ndarray, all_so_far: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """Return (curves,) the interpolated average precision of one label at one threshold.

    Args:
        right: (curves, detections) number of right detections up to each detection, or each right one.
        all_so_far: the same of all detections.
        reached: how many of the 101 recalls are reached there.
    """
    precision = right / (all_so_far + np.spacing(1))  # the epsilon of pycocotools
    best_from_here = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    return (best_from_here * np.diff(reached, axis=1, prepend=0)).sum(axis=1) / len(_RECALLS)


def _by_label(answers: Sequence[Judged]) -> list[dict[str, np.ndarray]]:
    """Return for each answer: label -> (answered, true) IoU of its boxes; empty for an answer without true boxes."""
    has_labels = any(box.label for answer in answers if answer.boxes is not None for box in answer.boxes.boxes)
    pairs = []
    for answer in answers:
        true = () if answer.boxes is None else answer.boxes.boxes
        answered = [] if answer.boxes is None else answered_boxes(answer)
        # Where nothing is to be found, the other answers say whether boxes have labels.
        compares_labels = any(box.label for box in true) if true else has_labels
        sides: dict[str, tuple[list, list]] = {}
        for side, boxes in enumerate((answered, true)):
            for box in boxes:
                label = normalize(box.label) if compares_labels else ""
                sides.setdefault(label, ([], []))[side].append(box.corners)
        pairs.append({label: ious_of(*both) for label, both in sides.items()})
    return pairs
