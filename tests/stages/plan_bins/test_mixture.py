"""Mixtures: how often each sample occurs in each epoch, by hand and by counting."""

import numpy as np
import pytest

from dataset_builders.errors import InputError
from stages.plan_bins.mixture import (
    SubsetDraw,
    SubsetMix,
    SubsetSize,
    count_epochs,
    draw_samples,
    make_draws,
    part_copies,
    with_shares,
)

SIZES = {"ai2d": SubsetSize(100, 50_000), "chartqa": SubsetSize(300, 30_000), "text": SubsetSize(40, 4000)}


def taken(draw: SubsetDraw, epoch: int) -> np.ndarray:
    return draw.copies(np.arange(draw.num_samples), epoch)


def test_without_a_mixture_everything_comes_once():
    draws = make_draws({}, SIZES)
    assert {name: draw.per_epoch for name, draw in draws.items()} == {"ai2d": 100, "chartqa": 300, "text": 40}
    assert all((taken(draw, epoch) == 1).all() for draw in draws.values() for epoch in (0, 7))
    assert count_epochs(5, draws) == 1


def test_a_third_each_epoch_takes_all_in_three():
    draw = make_draws({"chartqa": SubsetMix(repeats=1 / 3)}, SIZES)["chartqa"]
    epochs = [taken(draw, epoch) for epoch in range(6)]
    assert [int(copies.sum()) for copies in epochs] == [100] * 6
    assert (sum(epochs[:3]) == 1).all() and (sum(epochs[3:]) == 1).all()
    assert count_epochs(6, {"chartqa": draw}) == 6


def test_two_and_a_half_is_twice_and_half_of_it_again():
    draw = make_draws({"ai2d": SubsetMix(repeats=2.5)}, SIZES)["ai2d"]
    first, second = taken(draw, 0), taken(draw, 1)
    assert np.bincount(first).tolist() == [0, 0, 50, 50] and np.bincount(second).tolist() == [0, 0, 50, 50]
    assert (first + second == 5).all(), "the other half comes in the second epoch"


def test_a_fraction_is_always_the_same_samples():
    draw = make_draws({"chartqa": SubsetMix(fraction=0.1, repeats=2)}, SIZES)["chartqa"]
    first = taken(draw, 0)
    assert np.bincount(first).tolist() == [270, 0, 30] and (taken(draw, 9) == first).all()
    smaller = make_draws({"chartqa": SubsetMix(fraction=0.05)}, SIZES)["chartqa"]
    assert (first[taken(smaller, 0) == 1] == 2).all(), "a smaller fraction is part of a larger one"


def test_a_cap_counts_repeats():
    draw = make_draws({"ai2d": SubsetMix(repeats=3, max_samples=120)}, SIZES)["ai2d"]
    assert [int(taken(draw, epoch).sum()) for epoch in range(3)] == [120] * 3
    assert (sum(taken(draw, epoch) for epoch in range(5)) == 6).all()


def test_weights_are_shares_of_tokens_and_the_scarcest_is_used_up():
    mixture = {"ai2d": SubsetMix(weight=3), "chartqa": SubsetMix(weight=1), "text": SubsetMix(repeats=2)}
    draws = make_draws(mixture, SIZES)
    tokens = {name: draw.per_epoch * SIZES[name].num_tokens / SIZES[name].num_samples for name, draw in draws.items()}
    assert tokens["ai2d"] == 50_000 and tokens["chartqa"] == pytest.approx(50_000 / 3, rel=0.01)
    assert draws["text"].per_epoch == 80, "no weight: not scaled"
    # ai2d occurs at most four times, so now chartqa is the scarcest
    draws = make_draws({"ai2d": SubsetMix(weight=3, repeats=4), "chartqa": SubsetMix(weight=1)}, SIZES)
    assert draws["chartqa"].per_epoch == 300 and draws["ai2d"].per_epoch == 180
    draws = make_draws({"ai2d": SubsetMix(weight=3, max_samples=10), "chartqa": SubsetMix(weight=1)}, SIZES)
    assert (draws["ai2d"].per_epoch, draws["chartqa"].per_epoch) == (10, 17)


def test_partitions_do_not_change_what_is_taken():
    rng = np.random.default_rng(0)
    subsets = rng.integers(0, 2, 400)
    sizes = {name: SubsetSize(int((subsets == i).sum()), 1000) for i, name in enumerate(("a", "b"))}
    draws = make_draws({"a": SubsetMix(repeats=0.7), "b": SubsetMix(repeats=1.2, fraction=0.6)}, sizes)
    whole = draw_samples(draws, {"a": 0, "b": 0}, subsets, ["a", "b"], 1)
    ranks = {"a": int((subsets[:150] == 0).sum()), "b": int((subsets[:150] == 1).sum())}
    parts = [draw_samples(draws, {"a": 0, "b": 0}, subsets[:150], ["a", "b"], 1)]
    # the second partition numbers its subsets in another order
    parts.append(draw_samples(draws, ranks, 1 - subsets[150:], ["b", "a"], 1))
    assert np.array_equal(np.concatenate(parts), whole)


def _together(bins: np.ndarray, samples: np.ndarray) -> int:
    return len(bins) - len(np.unique(np.stack([bins, samples]), axis=1).T)


def test_copies_are_parted_and_no_bin_overflows():
    rng = np.random.default_rng(0)
    samples = np.sort(rng.integers(0, 60, 200))
    sizes = np.stack([rng.integers(5, 40, 60), rng.integers(0, 3, 60)], 1)[samples]
    bins = np.arange(200) // 4  # copies are next to each other
    loads = np.stack([np.bincount(bins, sizes[:, i]) for i in range(2)], 1)
    room = loads.max(0)
    assert _together(bins, samples) > 100
    parted, left = part_copies(bins, samples, sizes, room)
    assert left == _together(parted, samples) == 0
    assert (np.stack([np.bincount(parted, sizes[:, i]) for i in range(2)], 1) <= room).all()
    assert np.array_equal(np.bincount(parted), np.bincount(bins))


MIXED = {"mine_a": SubsetSize(100, 1000), "mine_b": SubsetSize(100, 3000), "web_x": SubsetSize(1000, 50_000)}


def tokens_of(draws, name):
    return draws[name].per_epoch * MIXED[name].num_tokens / MIXED[name].num_samples


def test_sources_share_an_epochs_tokens_and_their_subsets_share_by_their_own():
    draws = make_draws(with_shares({}, {"mine": 0.25, "web": 0.75}, MIXED), MIXED)
    assert tokens_of(draws, "mine_a") == 1000 and tokens_of(draws, "mine_b") == 3000  # all of the scarcest source
    assert tokens_of(draws, "web_x") == pytest.approx(12_000, rel=1e-2)
    one = make_draws(with_shares({}, {"web": 1}, MIXED), MIXED)
    assert [draw.per_epoch for draw in one.values()] == [100, 100, 1000]  # a source without a share is used completely


@pytest.mark.parametrize(
    ("mixture", "shares", "words"),
    [
        ({}, {"none": 1}, "data: the source none has a share, and no training sample of it fits a bin"),
        ({"web_x": SubsetMix(repeats=2)}, {"web": 1}, "plan_bins.mixture.web_x: its source web has a share in data"),
    ],
)
def test_shares_that_cannot_be_are_refused(mixture, shares, words):
    with pytest.raises(InputError, match=words):
        with_shares(mixture, shares, MIXED)
