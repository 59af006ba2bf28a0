"""The scores of a model's answers: by subset with its own metrics, and what they come to.

    {"ai2d": {"multiple_choice": 0.8, ..., "parse_failure_rate": 0.0, "score": 0.8},
     "overall": {"multiple_choice": 0.8, ..., "score": 0.74}}

`score` is a subset's headline metric, upwards (an error rate enters as 1 - rate), and of all subsets their mean, each
counting the same. Any other metric of `overall` is that metric over all answers of the subsets that have it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.scoring.contract import Judged, Metric
from stages.scoring.intervals import Bootstrap, Interval, Subset, groups_by_picture, interval, overall
from stages.scoring.names import OVERALL
from stages.scoring.subsets import SubsetMetrics, metrics_of
from stages.scoring.table import get_metric

SCORE, PARSE_FAILURES = "score", "parse_failure_rate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Answers to be scored, with what makes them depend on each other.

    Attributes:
        subset: of each answer.
        sample: key of each answer's sample.
        pictures: digests of the pictures of each answer's sample.
        judged: the answers.
    """

    subset: Sequence[str]
    sample: Sequence[str]
    pictures: Sequence[Sequence[str]]
    judged: Sequence[Judged]

    def of(self, subset: str) -> "Answered":
        """Those of one subset, in their order."""
        return self.take([row for row, name in enumerate(self.subset) if name == subset])

    def take(self, rows: Sequence[int]) -> "Answered":
        """Those of these rows."""
        return Answered(
            **{name: [getattr(self, name)[row] for row in rows] for name in ("subset", "sample", "pictures", "judged")}
        )

    @property
    def groups(self) -> np.ndarray:
        """(n,) labels: answers that share a sample or a picture are not independent."""
        return groups_by_picture(self.sample, self.pictures)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetScores:
    """What a subset's answers are worth.

    Attributes:
        metrics: which, and why.
        values: metric -> value, the headline first; NaN where there is nothing to score.
        headline: the headline metric with its interval.
        fields: metric -> field -> its scores, of metrics that know fields.
        rows: (n,) the headline of each answer alone; NaN where it has none.
        unparsed: (n,) answers in which some metric found nothing of its form; None where no metric looks for one.
    """

    metrics: SubsetMetrics
    values: dict[str, float]
    headline: Interval
    fields: dict[str, dict[str, dict[str, float]]]
    rows: np.ndarray
    unparsed: np.ndarray | None
    statistics: Subset


def score_subsets(
    answered: Answered, overrides: Mapping[str, Sequence[str]], bootstrap: Bootstrap
) -> tuple[dict[str, SubsetScores], Interval]:
    """The scores of every subset by name, and the mean of their headlines.

    Raises:
        ValueError: for no answers at all: a mean over nothing is no score.
        InputError: a metric of `overrides` does not exist.
    """
    names = sorted(set(answered.subset))
    found = {name: _score(answered.of(name), metrics_of(name, overrides), bootstrap) for name in names}
    return found, overall([scores.statistics for scores in found.values()], bootstrap)


def _score(answered: Answered, metrics: SubsetMetrics, bootstrap: Bootstrap) -> SubsetScores:
    judged = answered.judged
    headline = get_metric(metrics.headline)
    statistics = Subset(metric=headline, statistics=headline.statistics(judged), groups=answered.groups)
    failures = [found for name in metrics.names if (found := get_metric(name).unparsed(judged)) is not None]
    return SubsetScores(
        metrics=metrics,
        values={name: get_metric(name).score(judged) for name in metrics.names},
        headline=interval(statistics, bootstrap),
        fields={name: found for name in metrics.names if (found := get_metric(name).fields(judged))},
        rows=headline.value(statistics.statistics),
        unparsed=np.logical_or.reduce(failures) if failures else None,
        statistics=statistics,
    )


def table_of(answered: Answered, scores: Mapping[str, SubsetScores], score: Interval) -> dict[str, dict[str, float]]:
    """{subset or overall: {metric: value}} as in the module's head; what is NaN is left out."""
    table = {name: _row(found.values, upwards(found), found.unparsed) for name, found in scores.items()}
    shared: dict[str, list[str]] = {}
    for name, found in scores.items():
        for metric in found.values:
            shared.setdefault(metric, []).append(name)
    everywhere = {metric: _over(answered, names, get_metric(metric)) for metric, names in shared.items()}
    unparsed = [found.unparsed for found in scores.values() if found.unparsed is not None]
    table[OVERALL] = _row(everywhere, score.value, np.concatenate(unparsed) if unparsed else None)
    return table


def upwards(scores: SubsetScores) -> float:
    """The headline, so that more is better."""
    value = scores.headline.value
    return value if scores.statistics.metric.higher_is_better else 1 - value


def upward_rows(scores: SubsetScores) -> np.ndarray:
    """(n,) the headline of each answer alone, so that more is better; NaN where it has none."""
    return scores.rows if scores.statistics.metric.higher_is_better else 1 - scores.rows


def _over(answered: Answered, subsets: Sequence[str], metric: Metric) -> float:
    chosen = set(subsets)
    return metric.score([judged for judged, name in zip(answered.judged, answered.subset) if name in chosen])


def _row(values: Mapping[str, float], score: float, unparsed: np.ndarray | None) -> dict[str, float]:
    row = {**values, SCORE: score} | ({} if unparsed is None else {PARSE_FAILURES: float(unparsed.mean())})
    return {name: float(value) for name, value in row.items() if not np.isnan(value)}
