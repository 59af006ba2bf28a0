"""The interface of a metric: numbers per answer, and a score over any of these answers, each any number of times.

Most scores are functions of sums (`SumMetric`): a mean sums (score, 1), and BLEU sums its matches and lengths. A score
that depends on the order of the answers, as COCO's mAP does, keeps what it needs in a form of its own. Every metric
computes its score from weights of answers, so that one bootstrap works for all metrics.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dataset_builders.contracts.boxes import TrueBoxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A model's answer, with the question and the right answers."""

    question: str  # the user's text before the answer, without image slots
    references: tuple[str, ...]  # at least one: the assistant's text, or the answers of all annotators
    answer: str  # without special tokens
    boxes: TrueBoxes | None = None  # the right boxes; None if the data has none for this answer


class Metric(ABC):
    """A metric: one number over a set of answers."""

    name: ClassVar[str]  # in reports, tracking and recipes
    definition: ClassVar[str]  # exact, in a line or two
    source: ClassVar[str]  # paper, or repository and file; also the differences of ours, and the reasons
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, answers: Sequence[Judged]) -> Any:
        """Return what scores are computed from, in a form that has a length (n answers) and that only the metric reads.
        Numbers of the whole set (a document frequency) depend only on the references, so that two models' answers to
        the same questions are scored alike."""

    @abstractmethod
    def grouped(self, statistics: Any, groups: np.ndarray, count: int) -> Any:
        """Return the statistics with the answers of each group as one; `groups` is (n,) ints below `count`."""

    @abstractmethod
    def weighted(self, statistics: Any, weights: np.ndarray) -> np.ndarray:
        """Map (draws, n) numbers of times that each answer, or group, is drawn to (draws,) scores; NaN where there is
        nothing to score."""

    @abstractmethod
    def each(self, statistics: Any) -> np.ndarray:
        """Return (n,) the score of each single answer; NaN for an answer without one."""

    def total(self, statistics: Any) -> float:
        """Return the score of all answers together."""
        return float(self.weighted(statistics, np.ones((1, len(statistics))))[0])

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray | None:
        """Return (n,) bool: whether an answer lacks the metric's form and therefore scores as wrong; None for a metric
        that accepts any text."""
        return None

    def fields(self, answers: Sequence[Judged]) -> dict[str, dict[str, float]]:
        """Return field of the answers -> its own scores; empty for a metric without fields."""
        return {}

    def score(self, answers: Sequence[Judged]) -> float:
        """Return the metric over a set of answers; ValueError without one, as a mean over nothing is no score."""
        if not answers:
            raise ValueError("no answers to score")
        return self.total(self.statistics(answers))


class SumMetric(Metric):
    """A metric that is a function of sums: its statistics are (n, columns) float64, one row per answer."""

    columns: ClassVar[tuple[str, ...]]  # the names of the columns of `statistics`

    @abstractmethod
    def value(self, sums: np.ndarray) -> np.ndarray:
        """Map (..., columns) to (...): the score from sums of rows; NaN if there is nothing to score."""

    def grouped(self, statistics: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
        sums = np.zeros((count, statistics.shape[1]))
        np.add.at(sums, groups, statistics)
        return sums

    def weighted(self, statistics: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return self.value(weights @ statistics)

    def each(self, statistics: np.ndarray) -> np.ndarray:
        return self.value(statistics)


class MeanMetric(SumMetric):
    """A metric that is the mean of the scores of single answers."""

    columns = ("score", "answers")

    @abstractmethod
    def score_one(self, answer: Judged) -> float:
        """Return the score of one answer."""

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        return np.array([(self.score_one(answer), 1.0) for answer in answers]).reshape(-1, 2)

    def value(self, sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[..., 0] / sums[..., 1]
