"""Confidence intervals: percentile bootstrap over groups of answers, for one model and for the difference of two
models.

Answers to one sample's turns, or about one image, are not independent, so whole groups of answers are drawn (cluster
bootstrap; Davison and Hinkley 1997, Bootstrap Methods and their Application, sections 3.8 and 5.3). A resample is the
number of times that each group is drawn, from which a metric computes its score. Two models are compared on the same
draws (paired bootstrap; Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from stages.shared.scoring.metrics.contract import Metric

# Smaller differences are rounding errors: two sums of the same numbers in a different order.
ROUNDING = 1e-12
# Groups drawn at a time: 2 MB of draws and 2 MB of weights, which stay in the cache (2.8 times faster than 16 MB).
CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """The settings of the bootstrap."""

    resamples: int = 10_000
    level: float = 0.95  # of the interval, between 0 and 1
    seed: int = 0  # the same seed gives the same interval

    def __post_init__(self) -> None:
        if self.resamples < 1:
            raise ValueError(f"resamples={self.resamples}: at least 1")
        if not 0 < self.level < 1:
            raise ValueError(f"level={self.level}: between 0 and 1, say 0.95")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A score and the bounds of its interval; all NaN if there is nothing to score."""

    value: float
    low: float
    high: float
    level: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The second model's score minus the first's, on the same questions."""

    difference: float  # in the metric's own units; for an error rate, below 0 is better
    low: float
    high: float
    excludes_zero: bool  # whether the whole interval is above or below 0
    p_value: float  # two-sided; twice the share of resamples on the other side of 0 (never below 2 / (resamples + 1))
    wins: int  # answers to which the second model has the better score
    losses: int
    ties: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Subset:
    """A model's answers to the questions of one subset."""

    metric: Metric  # the subset's headline metric
    statistics: Any  # of that metric
    # (n,) labels of any kind; answers with the same label are drawn together. None: each answer is drawn separately.
    groups: Sequence | np.ndarray | None = None


def interval(subset: Subset, bootstrap: Bootstrap) -> Interval:
    """Return the percentile interval of a score."""
    (values,) = _resample([subset], bootstrap.resamples, np.random.default_rng(bootstrap.seed))
    return _interval(_total(subset), values, bootstrap)


def difference(first: Subset, second: Subset, bootstrap: Bootstrap) -> Difference:
    """Return the second model's score minus the first model's (base, then tuned); ValueError if they do not match."""
    _check_pair(first, second)
    generator = np.random.default_rng(bootstrap.seed)
    before, after = _resample([first, second], bootstrap.resamples, generator)
    return _difference(_total(second) - _total(first), after - before, _outcomes(first, second), bootstrap)


def overall(subsets: Sequence[Subset], bootstrap: Bootstrap) -> Interval:
    """Return the mean of the subsets' headline values; each subset is resampled separately.

    Every subset has the same weight, whatever its size. An error rate enters as 1 - rate, so more is always better.
    """
    _check_some(subsets)
    generator = np.random.default_rng(bootstrap.seed)
    values = np.zeros(bootstrap.resamples)
    for subset in subsets:
        (drawn,) = _resample([subset], bootstrap.resamples, generator)
        values += _upwards(subset.metric, drawn)
    value = np.mean([_upwards(subset.metric, _total(subset)) for subset in subsets])
    return _interval(float(value), values / len(subsets), bootstrap)


def overall_difference(first: Sequence[Subset], second: Sequence[Subset], bootstrap: Bootstrap) -> Difference:
    """Return the difference of two models' `overall` on the same subsets, in the same order; above 0, the second is
    better. ValueError if the subsets do not match."""
    _check_some(first)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} subsets of the first model but {len(second)} of the second")
    generator = np.random.default_rng(bootstrap.seed)
    values, point, outcomes = np.zeros(bootstrap.resamples), 0.0, np.zeros(3, np.int64)
    for one, two in zip(first, second):
        _check_pair(one, two)
        before, after = _resample([one, two], bootstrap.resamples, generator)
        sign = 1 if one.metric.higher_is_better else -1
        values += sign * (after - before)
        point += sign * (_total(two) - _total(one))
        outcomes += _outcomes(one, two)
    return _difference(point / len(first), values / len(first), outcomes, bootstrap)


def groups_by_picture(samples: Sequence[str], pictures: Sequence[Iterable[str]]) -> np.ndarray:
    """Return (n,) int32: labels that are equal for answers that share a sample or an image, directly or through other
    answers. `samples` are the keys of the answers' samples, `pictures` the digests of these samples' images."""
    nodes: dict[tuple[str, str], int] = {}
    pairs = []
    for sample, shown in zip(samples, pictures, strict=True):
        at = nodes.setdefault(("sample", sample), len(nodes))
        pairs += [(at, nodes.setdefault(("picture", picture), len(nodes))) for picture in shown]
    rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(pairs)), (rows, columns)), shape=(len(nodes), len(nodes)))
    labels = connected_components(graph, directed=False)[1] if nodes else np.zeros(0, np.int32)
    return labels[[nodes["sample", sample] for sample in samples]]


def _by_group(subset: Subset) -> Any:
    """Return the statistics with the answers of each group as one."""
    if subset.groups is None:
        return subset.statistics
    if len(subset.groups) != len(subset.statistics):
        raise ValueError(f"{len(subset.groups)} labels of groups for {len(subset.statistics)} answers")
    names, groups = np.unique(np.asarray(subset.groups), return_inverse=True)
    return subset.metric.grouped(subset.statistics, groups, len(names))


def _resample(subsets: Sequence[Subset], resamples: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Return for each subset (resamples,) scores over as many groups as exist, all from the same draws: the subsets are
    answers to the same questions, with the same groups."""
    tables = [_by_group(subset) for subset in subsets]
    count = len(tables[0])
    if count == 0:
        raise ValueError("no answers to score")
    values: list[list[np.ndarray]] = [[] for _ in subsets]
    rows = max(1, CHUNK // count)
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        draws = generator.integers(0, count, (size, count))
        draws += np.arange(size)[:, None] * count  # numbers of its own for each resample: one bincount counts all
        weights = np.bincount(draws.ravel(), minlength=size * count).reshape(size, count).astype(np.float64)
        # Each subset by itself, not in one product: equal tables then give bit-equal scores.
        for blocks, subset, table in zip(values, subsets, tables):
            blocks.append(subset.metric.weighted(table, weights))
    return [np.concatenate(blocks) for blocks in values]


def _interval(value: float, values: np.ndarray, bootstrap: Bootstrap) -> Interval:
    low, high = _bounds(value, values, bootstrap)
    return Interval(value=value, low=low, high=high, level=bootstrap.level)


def _difference(point: float, values: np.ndarray, outcomes: np.ndarray, bootstrap: Bootstrap) -> Difference:
    values = np.where(np.abs(values) < ROUNDING, 0.0, values)
    low, high = _bounds(point, values, bootstrap)
    wins, losses, ties = (int(number) for number in outcomes)
    # Twice the smaller tail at 0; the answers count as one resample (Davison and Hinkley 1997, 4.2).
    tails = np.sum(values <= 0), np.sum(values >= 0)
    p_value = float(min(1.0, 2 * (min(tails) + 1) / (np.sum(~np.isnan(values)) + 1))) if not np.isnan(point) else np.nan
    return Difference(
        difference=point,
        low=low,
        high=high,
        excludes_zero=bool(low > 0 or high < 0),
        p_value=p_value,
        wins=wins,
        losses=losses,
        ties=ties,
    )


def _bounds(point: float, values: np.ndarray, bootstrap: Bootstrap) -> tuple[float, float]:
    """Return percentiles of the resamples that have a value; NaN if the answers themselves have none."""
    if np.isnan(point):
        return np.nan, np.nan
    scored = values[~np.isnan(values)]
    if len(scored) == 0:
        return np.nan, np.nan
    tail = (1 - bootstrap.level) / 2
    low, high = np.quantile(scored, [tail, 1 - tail])
    return float(low), float(high)


def _outcomes(first: Subset, second: Subset) -> np.ndarray:
    """Return the second model's (wins, losses, ties) over answers; a value missing for either model is a tie."""
    gain = second.metric.each(second.statistics) - first.metric.each(first.statistics)
    gain = np.nan_to_num(gain if first.metric.higher_is_better else -gain)
    wins, losses = np.sum(gain > ROUNDING), np.sum(gain < -ROUNDING)
    return np.array([wins, losses, len(gain) - wins - losses])


def _total(subset: Subset) -> float:
    return subset.metric.total(subset.statistics)


def _upwards(metric: Metric, value):
    return value if metric.higher_is_better else 1 - value


def _check_some(subsets: Sequence[Subset]) -> None:
    if not subsets:
        raise ValueError("no subset to take the mean of")


def _check_pair(first: Subset, second: Subset) -> None:
    """Raise ValueError unless both models answer the same questions, scored by the same metric."""
    if first.metric.name != second.metric.name:
        raise ValueError(f"{first.metric.name} of the first model but {second.metric.name} of the second")
    if len(first.statistics) != len(second.statistics):
        raise ValueError(
            f"{len(first.statistics)} answers of the first model but {len(second.statistics)} of the second"
        )
    if (first.groups is None) != (second.groups is None) or (
        first.groups is not None and not np.array_equal(first.groups, second.groups)
    ):
        raise ValueError("the groups of the two models differ: the answers are not to the same samples")
