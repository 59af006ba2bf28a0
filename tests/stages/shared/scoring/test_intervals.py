"""Bootstrap intervals: against scipy, by their coverage, and when there is nothing to draw."""

import math

import numpy as np
import pytest
from scipy import stats

from stages.shared.scoring import intervals
from stages.shared.scoring.intervals import (
    Bootstrap,
    Subset,
    difference,
    groups_by_picture,
    interval,
    overall,
    overall_difference,
)
from stages.shared.scoring.metrics.contract import Judged, MeanMetric, Metric, SumMetric
from stages.shared.scoring.metrics.cord import CordFieldF1

pytestmark = pytest.mark.promise(
    "The gain over the model before training has a paired bootstrap interval, and gates keep a model out of the "
    "registry, one that never learnt to end its answers too, but not its sound twin."
)

SMALL = Bootstrap(resamples=400)


class Score(MeanMetric):
    name, definition, source = "score", "a number", "none"

    def score_one(self, answer: Judged) -> float:
        return float(answer.answer)


class ErrorRate(SumMetric):
    name, definition, source = "error_rate", "errors / words", "none"
    columns = ("errors", "words")
    higher_is_better = False

    def statistics(self, answers):
        raise NotImplementedError

    def value(self, sums):
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[..., 0] / sums[..., 1]


def scored(values, groups=None, metric: Metric | None = None) -> Subset:
    values = np.asarray(values, float)
    statistics = np.stack([values, np.ones_like(values)], axis=1)
    return Subset(metric=metric or Score(), statistics=statistics, groups=groups)


def normal(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.5, 0.2, count)


def of_scipy(values: np.ndarray, level: float):
    """Return scipy's bootstrap of the mean, with the draws of `Bootstrap(resamples=999, seed=5)`."""
    options = {"n_resamples": 999, "confidence_level": level, "method": "percentile"}
    return stats.bootstrap((values,), np.mean, rng=np.random.default_rng(5), **options)


@pytest.mark.parametrize("chunk", [intervals.CHUNK, 100, 1])
def test_a_mean_is_that_of_scipy(monkeypatch, chunk):
    monkeypatch.setattr(intervals, "CHUNK", chunk)
    values = normal(1, 57)
    found = interval(scored(values), Bootstrap(resamples=999, level=0.9, seed=5))
    np.testing.assert_allclose([found.low, found.high], of_scipy(values, 0.9).confidence_interval, atol=1e-12)
    assert found.value == pytest.approx(values.mean()) and found.level == 0.9


def test_a_paired_difference_is_that_of_scipy():
    first, second = normal(1, 57), normal(2, 57) + 0.05
    found = difference(scored(first), scored(second), Bootstrap(resamples=999, seed=5))
    theirs = of_scipy(second - first, 0.95)
    np.testing.assert_allclose([found.low, found.high], theirs.confidence_interval, atol=1e-12)
    assert found.difference == pytest.approx((second - first).mean())
    over = np.sum(theirs.bootstrap_distribution <= 0)
    assert found.p_value == 2 * (min(over, 999 - over) + 1) / 1000


def test_a_ratio_of_sums_is_resampled_by_answers():
    rows = np.random.default_rng(3).integers(0, 9, (40, 3)).astype(float)
    found = interval(Subset(metric=CordFieldF1(), statistics=rows), Bootstrap(resamples=500, seed=2))
    generator = np.random.default_rng(2)
    values = []
    for _ in range(500):
        right, extra, missing = rows[generator.integers(0, 40, 40)].sum(axis=0)
        values.append(right / (right + (extra + missing) / 2))
    np.testing.assert_allclose([found.low, found.high], np.quantile(values, [0.025, 0.975]), atol=1e-12)


def test_groups_are_drawn_whole():
    values, groups = normal(4, 30), [f"sample {at % 10}" for at in range(30)]
    sums = np.array([[values[at::10].sum(), 3.0] for at in range(10)])
    whole = interval(Subset(metric=Score(), statistics=sums), SMALL)
    found = interval(scored(values, groups), SMALL)
    np.testing.assert_allclose([found.value, found.low, found.high], [whole.value, whole.low, whole.high], atol=1e-12)
    assert found.high - found.low > 0.01


def coverage(groups: np.ndarray | None) -> float:
    """Return the share of 400 data sets of mean 0 whose interval contains 0: of five values, which are correlated, for
    each of 60 images."""
    held = 0
    for seed in range(400):
        generator = np.random.default_rng([7, seed])
        values = np.repeat(generator.normal(size=60), 5) + 0.3 * generator.normal(size=300)
        found = interval(scored(values, groups), Bootstrap(resamples=300, seed=seed))
        held += found.low <= 0 <= found.high
    return held / 400


def test_only_the_cluster_bootstrap_covers_as_often_as_it_says_where_answers_hang_together():
    assert 0.92 <= coverage(np.repeat(np.arange(60), 5)) <= 0.97
    assert coverage(None) < 0.75


def test_the_difference_excludes_zero_as_seldom_as_it_says():
    found = [
        difference(scored(normal(2 * seed, 80)), scored(normal(2 * seed + 1, 80)), Bootstrap(resamples=200, seed=seed))
        for seed in range(1000)
    ]
    assert 0.03 <= np.mean([one.excludes_zero for one in found]) <= 0.08
    assert 0.03 <= np.mean([one.p_value < 0.05 for one in found]) <= 0.08
    assert all(one.excludes_zero == (one.low > 0 or one.high < 0) for one in found)


def test_wins_losses_and_ties():
    first, second = [0, 0, 1, 1, 0.5, 0.3], [1, 1, 0, 1, 0.5, 0.1 + 0.2]
    found = difference(scored(first), scored(second), SMALL)
    assert (found.wins, found.losses, found.ties) == (2, 1, 3)
    fewer_errors = difference(scored(first, metric=ErrorRate()), scored(second, metric=ErrorRate()), SMALL)
    assert (fewer_errors.wins, fewer_errors.losses, fewer_errors.ties) == (1, 2, 3)
    assert fewer_errors.difference == found.difference
    fall = difference(scored(normal(1, 50) + 1), scored(normal(2, 50)), SMALL)
    assert fall.excludes_zero and fall.high < 0 and fall.losses == 50


def test_equal_models_differ_by_nothing():
    same = scored(normal(3, 33), groups=np.arange(33) // 2)
    found = difference(same, same, SMALL)
    assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)
    assert not found.excludes_zero and found.ties == 33


def test_rounding_is_no_difference():
    # 0.1 + 0.2 is not 0.3: every resample differs by 4e-17.
    found = difference(scored([0.3] * 9), scored([0.1 + 0.2] * 9), SMALL)
    assert (found.low, found.high, found.excludes_zero, found.p_value, found.ties) == (0, 0, False, 1, 9)


@pytest.mark.parametrize("values", [[0.7], [0.3] * 20, [0.0] * 5])
def test_one_answer_and_equal_answers_have_an_interval_without_width(values):
    found = interval(scored(values), SMALL)
    np.testing.assert_allclose([found.value, found.low, found.high], values[0], atol=1e-12)


def test_nothing_to_score_is_nan_all_through():
    empty = Subset(metric=CordFieldF1(), statistics=np.zeros((5, 3)))
    found = interval(empty, SMALL)
    assert np.isnan([found.value, found.low, found.high]).all()
    compared = difference(empty, empty, SMALL)
    assert np.isnan([compared.difference, compared.low, compared.high, compared.p_value]).all()
    assert not compared.excludes_zero and compared.ties == 5
    assert math.isnan(overall([scored([1, 0]), empty], SMALL).value)
    assert math.isnan(overall_difference([empty], [empty], SMALL).difference)


def test_a_resample_without_a_value_is_left_out():
    # Only the first row can be scored, and a third of the draws do not contain it.
    rows = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = interval(Subset(metric=CordFieldF1(), statistics=rows), SMALL)
    assert found.value == found.low == found.high == 1 / 1.5


def test_no_answers_no_subsets():
    with pytest.raises(ValueError, match="no answers"):
        interval(scored([]), SMALL)
    for call in (lambda: overall([], SMALL), lambda: overall_difference([], [], SMALL)):
        with pytest.raises(ValueError, match="no subset"):
            call()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (scored([1, 2, 3]), "2 answers of the first model but 3"),
        (scored([1, 2], metric=ErrorRate()), "score of the first model but error_rate"),
        (scored([1, 2]), "groups of the two models differ"),
        (scored([1, 2], groups=["a", "c"]), "groups of the two models differ"),
    ],
)
def test_only_answers_to_the_same_questions_are_compared(second, message):
    first = scored([1, 2], groups=["a", "b"])
    with pytest.raises(ValueError, match=message):
        difference(first, second, SMALL)
    with pytest.raises(ValueError, match=message):
        overall_difference([first], [second], SMALL)
    with pytest.raises(ValueError, match="1 subsets of the first model but 2"):
        overall_difference([first], [first, second], SMALL)


def test_groups_name_every_answer():
    with pytest.raises(ValueError, match="3 labels of groups for 2 answers"):
        interval(scored([1, 2], groups=[1, 2, 3]), SMALL)


@pytest.mark.parametrize("wrong", [{"resamples": 0}, {"level": 0.0}, {"level": 1.0}, {"level": 95}])
def test_a_bootstrap_that_makes_no_interval_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Bootstrap(**wrong)


def test_overall_counts_every_subset_the_same():
    large, small = scored(normal(1, 900)), scored(normal(2, 30) + 0.3)
    found = overall([large, small], Bootstrap(resamples=4000))
    one, two = interval(large, SMALL).value, interval(small, SMALL).value
    assert found.value == pytest.approx((one + two) / 2)
    # The variances of independent subsets add up.
    error = np.sqrt(sum(subset.statistics[:, 0].var() / len(subset.statistics) for subset in (large, small))) / 2
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert found.low < found.value < found.high


def test_overall_turns_error_rates_round():
    wrong = scored([0.25] * 8, metric=ErrorRate())
    assert overall([scored([0.5] * 8), wrong], SMALL).value == pytest.approx((0.5 + 0.75) / 2)
    assert interval(wrong, SMALL).value == pytest.approx(0.25)
    better = scored([0.05] * 8, metric=ErrorRate())
    found = overall_difference([scored([0.5] * 8), wrong], [scored([0.5] * 8), better], SMALL)
    assert found.difference == pytest.approx(0.1) and found.excludes_zero
    assert found.low == pytest.approx(0.1) and (found.wins, found.losses, found.ties) == (8, 0, 8)


def test_the_overall_difference_is_paired_within_each_subset():
    first = [scored(normal(1, 60)), scored(normal(2, 40))]
    second = [scored(one.statistics[:, 0] + 0.01) for one in first]
    found = overall_difference(first, second, SMALL)
    np.testing.assert_allclose([found.difference, found.low, found.high], 0.01, atol=1e-12)
    single = overall_difference(first[:1], [scored(normal(3, 60))], SMALL)
    assert single == difference(first[0], scored(normal(3, 60)), SMALL)


def test_the_seed_decides():
    subset = scored(normal(1, 40))
    assert interval(subset, SMALL) == interval(subset, Bootstrap(resamples=400))
    assert interval(subset, SMALL) != interval(subset, Bootstrap(resamples=400, seed=1))


def test_answers_that_share_a_picture_share_a_group():
    samples = ["a", "a", "b", "c", "d", "e"]
    pictures = [["1"], ["1"], ["2", "3"], ["3"], ["1", "4"], []]
    groups = groups_by_picture(samples, pictures)
    assert [list(groups).index(group) for group in groups] == [0, 0, 2, 2, 0, 5]
    assert len(groups_by_picture([], [])) == 0
    assert groups_by_picture(["1"], [["a"]]).tolist() == [0]
    # A sample's key never equals an image's digest, even if both are the same text.
    assert len(set(groups_by_picture(["x", "y"], [[], ["x"]]))) == 2
