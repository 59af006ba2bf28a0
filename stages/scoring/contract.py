"""What a metric is: numbers of each answer that add up, and what their sums come to.

A mean of per-answer scores, a corpus score (BLEU, a micro F1) and an error rate differ in what they sum: a mean sums
(score, 1), BLEU its matches and lengths. Because every metric says what it sums, one bootstrap serves all of them:
resampling answers is weighting rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """An answer beside what the data says.

    Attributes:
        question: the user's text before it, without image slots.
        references: right answers, at least one: the assistant's text, or what all annotators said.
        answer: what the model said, without special tokens.
    """

    question: str
    references: tuple[str, ...]
    answer: str


class Metric(ABC):
    """One number over a set of answers.

    Attributes:
        name: as in reports, tracking and recipes.
        definition: exact, in a line or two.
        source: where the definition comes from: paper, or repository and file; and where ours differs, and why.
        columns: what `statistics` sums.
        higher_is_better: False for error rates.
    """

    name: ClassVar[str]
    definition: ClassVar[str]
    source: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        """(n, columns) float64, a row an answer. What it takes from the whole set (a document frequency) it takes from
        the references alone, so that two models' answers to the same questions are scored alike."""

    @abstractmethod
    def value(self, sums: np.ndarray) -> np.ndarray:
        """(..., columns) -> (...): the score of sums of rows; NaN where there is nothing to score."""

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray | None:
        """(n,) bool: answers in which the metric found nothing of the form it looks for, scored as wrong; None for a
        metric that takes any text."""
        return None

    def fields(self, answers: Sequence[Judged]) -> dict[str, dict[str, float]]:
        """Field of the answers -> what the metric says of it alone; nothing for a metric that knows no fields."""
        return {}

    def score(self, answers: Sequence[Judged]) -> float:
        """The metric over a set of answers.

        Raises:
            ValueError: for no answers at all: a mean over nothing is no score.
        """
        if not answers:
            raise ValueError("no answers to score")
        return float(self.value(self.statistics(answers).sum(axis=0)))


class MeanMetric(Metric):
    """A metric that is the mean of a score of each answer."""

    columns = ("score", "answers")

    @abstractmethod
    def score_one(self, answer: Judged) -> float:
        """The score of one answer."""

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        return np.array([(self.score_one(answer), 1.0) for answer in answers]).reshape(-1, 2)

    def value(self, sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[..., 0] / sums[..., 1]
