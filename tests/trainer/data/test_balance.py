import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dataset_builders.contracts.bins import SampleRef
from tests.helpers.bins import ONE_IMAGE, TALL_IMAGE, TEXT_ONLY, TWO_IMAGES, Kind, ListedPlan, make_samples, sum_bin
from tests.helpers.reference import random_hf_dir
from trainer.data.balance import TOLERANCE, CostModel, Work, deal, planned_work, spread_images
from trainer.data.flops import cost_model, model_flops
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.data.order import TrainingOrder, bins_for_step
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Bins keep their limits, any step's are found without holding an epoch, and dealing them to ranks by cost, "
    "threads and resumes change none of a step's samples."
)

LAYOUTS = [(ranks, slots) for ranks in (1, 2, 3, 8, 64) for slots in (1, 2, 5, 8)]


def ref(tokens: int = 10, loss_tokens: int = 3, patches: int = 0, images: int = 0) -> SampleRef:
    return SampleRef("made/00000000", "train/shard-00000.tar", 0, 1, tokens, loss_tokens, patches, images, 0)


# Images among ranks


def test_images_are_spread_by_patches_not_by_count():
    assert spread_images([8, 4, 100, 4, 16], 2) == [[2], [0, 1, 3, 4]]
    assert spread_images([4, 4, 4, 4, 4], 2) == [[0, 2, 4], [1, 3]]  # ties: the lower image, the lower rank
    assert spread_images([4, 8], 3) == [[1], [0], []]
    assert spread_images([], 2) == [[], []]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_no_rank_gets_a_third_more_patches_than_it_must(ranks, seed):
    rng = np.random.default_rng([ranks, seed])
    patches = (4 * rng.integers(1, 700, rng.integers(0, 40))).tolist()
    shares = spread_images(patches, ranks)
    assert shares == [sorted(share) for share in shares] and len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(patches)))
    loads = [sum(patches[i] for i in share) for share in shares]
    # Graham 1969: 4/3 - 1/(3 ranks) of the best there is, which is no less than the mean and the largest image; where
    # one rank must take two of the largest, no less than the smallest two of them.
    largest = sorted(patches, reverse=True)
    pair = sum(largest[ranks - 1 : ranks + 1]) if len(patches) > ranks else 0
    least = max(sum(patches) / ranks, max(patches, default=0), pair)
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * least


# What a bin costs


def test_work_of_a_bin_is_read_off_the_plan():
    refs = (ref(tokens=100, loss_tokens=30), ref(tokens=50, loss_tokens=2, patches=80, images=1))
    refs += (ref(tokens=40, loss_tokens=1, patches=60, images=3),)
    assert planned_work(sum_bin(refs), 256) == Work(256, 33, 100**2 + 50**2 + 40**2, 140, 80**2 + 3 * 20**2)


def test_the_plans_cost_is_the_flops_of_the_bin():
    sizes = read_model(random_hf_dir("first"))[1]

    def both(kinds):
        samples = make_samples(kinds, geometry_of(sizes), range(20, 90))
        batch = make_micro_batch(samples, geometry_of(sizes), sum(len(s.input_ids) for s in samples))
        refs = [
            ref(len(s.input_ids), int(s.loss_mask[1:].sum()), len(s.patches), len(s.image_grid_thw)) for s in samples
        ]
        planned = cost_model(sizes).planned_cost(sum_bin(tuple(refs)), batch.num_tokens)
        return planned, model_flops(cost_model(sizes), batch).values()

    planned, (vision, language) = both([ONE_IMAGE, TEXT_ONLY, TALL_IMAGE, Kind(9, videos=((5, 4, 6),))])
    assert planned == vision + language
    planned, (vision, language) = both([TWO_IMAGES])  # 4 and 24 patches count as 14 and 14
    unequal = cost_model(sizes).per_patch_squared * (4**2 + 24**2 - 28**2 / 2)
    assert planned == vision + language - unequal


# Bins among data-parallel ranks


def draw_costs(ranks: int, slots: int, seed: int) -> list[float]:
    return np.random.default_rng([ranks, slots, seed]).lognormal(0, 0.3, ranks * slots).tolist()


def totals_of(shares: list[list[int]], costs: list[float]) -> list[float]:
    return [sum(costs[i] for i in share) for share in shares]


def lockstep_of(shares: list[list[int]], costs: list[float]) -> float:
    """The number of micro batches is equal on ranks that synchronise at every one of them."""
    return sum(max(costs[i] for i in slot) for slot in zip(*shares))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "slots"), LAYOUTS)
def test_each_rank_gets_as_many_bins_costliest_first(ranks, slots, seed):
    costs = draw_costs(ranks, slots, seed)
    shares = deal(costs, ranks)
    assert [len(share) for share in shares] == [slots] * ranks
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    for share in shares:
        assert [costs[i] for i in share] == sorted((costs[i] for i in share), reverse=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "slots"), LAYOUTS)
def test_no_swap_of_two_bins_would_help(ranks, slots, seed):
    costs = draw_costs(ranks, slots, seed)
    shares = deal(costs, ranks)
    totals = totals_of(shares, costs)
    worst = max(range(ranks), key=totals.__getitem__)
    if totals[worst] <= (1 + TOLERANCE) * sum(totals) / ranks:
        return
    for other in set(range(ranks)) - {worst}:
        for mine, theirs in itertools.product(shares[worst], shares[other]):
            gain = costs[mine] - costs[theirs]
            assert max(totals[worst] - gain, totals[other] + gain) >= totals[worst] * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "slots"), [(2, 8), (8, 8), (64, 8), (8, 32)])
def test_ranks_and_slots_are_alike(ranks, slots, seed):
    costs = draw_costs(ranks, slots, seed)
    shares = deal(costs, ranks)
    strided = [list(range(len(costs)))[r::ranks] for r in range(ranks)]
    mean = sum(costs) / ranks
    least = sum(sorted(costs, reverse=True)[::ranks])  # no deal has a smaller sum of the slots' costliest
    # what no deal can do without: the costliest bin in the company of the cheapest
    bound = max(mean, max(costs) + sum(sorted(costs)[: slots - 1]))
    assert max(totals_of(shares, costs)) <= 1.003 * bound < max(totals_of(strided, costs))
    assert least <= lockstep_of(shares, costs) <= 1.04 * least < lockstep_of(strided, costs)


@pytest.mark.parametrize("seed", range(3))
def test_many_slots_even_out_by_themselves(seed):
    """The costliest bin of a slot to the rank with the least, widest slots first: nothing is left to swap."""
    costs = draw_costs(8, 32, seed)
    shares = deal(costs, 8)
    assert max(totals_of(shares, costs)) <= (1 + TOLERANCE / 10) * sum(costs) / 8
    assert lockstep_of(shares, costs) == pytest.approx(sum(sorted(costs, reverse=True)[::8]), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_near_the_best_of_all_deals(seed):
    costs = draw_costs(2, 4, seed)
    best = min(
        max(sum(costs[i] for i in half), sum(costs) - sum(costs[i] for i in half))
        for half in itertools.combinations(range(8), 4)
    )
    assert best <= max(totals_of(deal(costs, 2), costs)) <= 1.02 * best


def test_ties_and_edges():
    assert deal([1.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert deal([0.0] * 4, 2) == [[0, 2], [1, 3]]
    assert deal([3.0, 1.0, 2.0], 1) == [[0, 2, 1]]
    assert deal([3.0, 1.0, 2.0], 3) == [[0], [2], [1]]
    assert deal([], 2) == [[], []]
    with pytest.raises(ValueError, match="7 bins cannot be dealt evenly to 2 ranks"):
        deal([1.0] * 7, 2)


def test_a_bin_and_its_cost_decide_not_its_place():
    costs = draw_costs(8, 8, 0)
    order = np.random.default_rng(1).permutation(64).tolist()
    moved = deal([costs[i] for i in order], 8)
    assert [[order[i] for i in share] for share in moved] == deal(costs, 8)


# The order of training


BINS = [(ref(tokens=20 + 7 * n, patches=48 * (n % 3), images=n % 3), ref(tokens=90 - 5 * n)) for n in range(10)]
COSTS = CostModel(per_token=1, per_loss_token=2, per_token_squared=0.1, per_patch=3, per_patch_squared=0.2)


def share(
    dp_rank: int, dp: int, start: int, stop: int, *, size: int = 8, num_bins: int = 10, balance: bool = True
) -> list[int]:
    order = TrainingOrder(
        SimpleNamespace(bins=ListedPlan(BINS[:num_bins])),
        seed=3,
        global_batch_size=size,
        dp_rank=dp_rank,
        dp=dp,
        bin_cost=(lambda sums: COSTS.planned_cost(sums, 128)) if balance else None,
    )
    return list(order(start, stop))


@pytest.mark.parametrize("num_bins", [10, 3])  # 3: a global batch holds a bin more than once
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_the_ranks_share_the_global_batch_whole(dp, num_bins):
    for step in range(6):
        shares = [share(rank, dp, step, step + 1, num_bins=num_bins) for rank in range(dp)]
        assert {len(s) for s in shares} == {8 // dp}
        undealt = bins_for_step([num_bins], seed=3, step=step, global_batch_size=8)
        assert Counter(n for s in shares for n in s) == Counter(undealt)


def test_it_is_dealt_by_cost_only_where_asked():
    cost = {n: COSTS.planned_cost(sum_bin(refs), 128) for n, refs in enumerate(BINS)}
    by_cost = strided = 0.0
    for step in range(6):
        undealt = bins_for_step([10], seed=3, step=step, global_batch_size=8)
        places = deal([cost[n] for n in undealt], 2)
        shares = [share(rank, 2, step, step + 1) for rank in range(2)]
        assert shares == [[undealt[place] for place in mine] for mine in places]
        by_cost += max(totals_of(shares, cost))
        shares = [share(rank, 2, step, step + 1, balance=False) for rank in range(2)]
        assert shares == [undealt[0::2], undealt[1::2]]
        strided += max(totals_of(shares, cost))
    assert by_cost < strided


def test_bins_whose_features_are_read_cost_their_language_alone():
    cost = cost_model(read_model(random_hf_dir("first"))[1])
    with_images = sum_bin((ref(tokens=90, patches=400, images=2),))
    without = sum_bin((ref(tokens=90),))
    assert cost.planned_cost(with_images, 128) > cost.planned_cost(without, 128)
    assert cost.without_vision().planned_cost(with_images, 128) == cost.planned_cost(without, 128)
