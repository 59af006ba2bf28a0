"""The interface of a metric: additive numbers per answer, and a score computed from their sums.

A mean of per-answer scores, a corpus score (BLEU, a micro F1) and an error rate differ in their sums: a mean sums
(score, 1), and BLEU sums its matches and lengths. Every metric defines its summed numbers, so that one bootstrap works
for all metrics: resampling answers means weighting rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    columns: ClassVar[tuple[str, ...]]  # the names of the columns of `statistics`
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        """Return (n, columns) float64, one row per answer. Numbers of the whole set (a document frequency) depend only
        on the references, so that two models' answers to the same questions are scored alike."""

    @abstractmethod
    def value(self, sums: np.ndarray) -> np.ndarray:
        """Map (..., columns) to (...): the score from sums of rows; NaN if there is nothing to score."""

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
        return float(self.value(self.statistics(answers).sum(axis=0)))


class MeanMetric(Metric):
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
