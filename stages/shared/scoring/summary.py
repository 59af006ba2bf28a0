"""The scores of a model's answers: each subset by its own metrics, and all subsets together.

    {"ai2d": {"multiple_choice": 0.8, ..., "parse_failure_rate": 0.0, "score": 0.8},
     "overall": {"multiple_choice": 0.8, ..., "score": 0.74}}

`score` is a subset's headline metric, converted so that more is better (an error rate enters as 1 - rate). The `score`
of `overall` is the mean over subsets, each with the same weight. Any other metric of `overall` is that metric over all
answers of the subsets that have it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.shared.scoring.intervals import Bootstrap, Interval, Subset, groups_by_picture, interval, overall
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.names import OVERALL, PARSE_FAILURES, SCORE
from stages.shared.scoring.subsets import SubsetMetrics, get_metric


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSet:
    """Answers to score, with the samples and images that make them depend on each other."""

    subset: Sequence[str]  # of each answer
    sample: Sequence[str]  # key of each answer's sample
    pictures: Sequence[Sequence[str]]  # digests of the images of each answer's sample
    judged: Sequence[Judged]

    def of(self, subset: str) -> "AnswerSet":
        """Return the answers of one subset, in their order."""
        return self.take([row for row, name in enumerate(self.subset) if name == subset])

    def take(self, rows: Sequence[int]) -> "AnswerSet":
        return AnswerSet(
            **{name: [getattr(self, name)[row] for row in rows] for name in ("subset", "sample", "pictures", "judged")}
        )

    @property
    def groups(self) -> np.ndarray:
        """The (n,) group labels of the answers: answers that share a sample or an image are not independent."""
        return groups_by_picture(self.sample, self.pictures)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetScores:
    """The scores of a subset's answers."""

    metrics: SubsetMetrics
    values: dict[str, float]  # metric -> value, the headline first; NaN if there is nothing to score
    headline: Interval  # of the headline metric
    fields: dict[str, dict[str, dict[str, float]]]  # metric -> field -> its scores, for metrics with fields
    rows: np.ndarray  # (n,) the headline metric of each single answer; NaN for an answer without one
    unparsed: np.ndarray | None  # (n,) whether an answer lacks the form that a metric requires; None: none does
    statistics: Subset  # the data that the headline's interval is computed from


def score_subsets(
    answered: AnswerSet, metrics_of: Mapping[str, SubsetMetrics], bootstrap: Bootstrap
) -> tuple[dict[str, SubsetScores], Interval]:
    """Return the scores of every subset by name, and the mean of their headlines; ValueError without answers.

    Args:
        metrics_of: subset -> its metrics, for all subsets of the answers.
    """
    names = sorted(set(answered.subset))
    scores_of = {name: _score(answered.of(name), metrics_of[name], bootstrap) for name in names}
    return scores_of, overall([scores.statistics for scores in scores_of.values()], bootstrap)


def _score(answered: AnswerSet, metrics: SubsetMetrics, bootstrap: Bootstrap) -> SubsetScores:
    judged = answered.judged
    headline = get_metric(metrics.headline)
    statistics = Subset(metric=headline, statistics=headline.statistics(judged), groups=answered.groups)
    failures = [rows for name in metrics.names if (rows := get_metric(name).unparsed(judged)) is not None]
    return SubsetScores(
        metrics=metrics,
        values={name: get_metric(name).score(judged) for name in metrics.names},
        headline=interval(statistics, bootstrap),
        fields={name: fields for name in metrics.names if (fields := get_metric(name).fields(judged))},
        rows=headline.each(statistics.statistics),
        unparsed=np.logical_or.reduce(failures) if failures else None,
        statistics=statistics,
    )


def table_of(
    answered: AnswerSet, scores_of: Mapping[str, SubsetScores], score: Interval
) -> dict[str, dict[str, float]]:
    """Return {subset or overall: {metric: value}} as in the module's docstring, without values that are NaN."""
    table = {subset: _row(scores.values, upwards(scores), scores.unparsed) for subset, scores in scores_of.items()}
    everywhere = {}
    for metric in dict.fromkeys(metric for scores in scores_of.values() for metric in scores.values):
        judged = [each for each, subset in zip(answered.judged, answered.subset) if metric in scores_of[subset].values]
        everywhere[metric] = get_metric(metric).score(judged)
    unparsed = [scores.unparsed for scores in scores_of.values() if scores.unparsed is not None]
    table[OVERALL] = _row(everywhere, score.value, np.concatenate(unparsed) if unparsed else None)
    return table


def upwards(scores: SubsetScores) -> float:
    """Return the headline, converted so that more is better."""
    value = scores.headline.value
    return value if scores.statistics.metric.higher_is_better else 1 - value


def upward_rows(scores: SubsetScores) -> np.ndarray:
    """Return (n,) the headline of each single answer, converted so that more is better; NaN without a value."""
    return scores.rows if scores.statistics.metric.higher_is_better else 1 - scores.rows


def _row(values: Mapping[str, float], score: float, unparsed: np.ndarray | None) -> dict[str, float]:
    row = {**values, SCORE: score} | ({} if unparsed is None else {PARSE_FAILURES: float(unparsed.mean())})
    return {name: float(value) for name, value in row.items() if not np.isnan(value)}
