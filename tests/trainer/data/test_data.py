import copy
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from dataset_builders.contracts.bins import read_bins, write_bin_partition, write_bins
from dataset_builders.contracts.tokenized import INDEX_SCHEMA
from tests.helpers.bins import ListedPlan
from tests.helpers.patience import at_most
from tests.helpers.run_dir import SEQ_LEN, write_job
from trainer.data.balance import CostModel
from trainer.data.micro_batch import geometry_of
from trainer.data.order import TrainingOrder, bins_at, bins_for_step
from trainer.data.reader import BinReader, prefetch
from trainer.data.slices import RankSlice
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Bins keep their limits, any step's are found without holding an epoch, and dealing them to ranks by cost, "
    "threads and resumes change none of a step's samples."
)


@pytest.mark.parametrize(("num_bins", "size"), [(10, 4), (3, 4), (7, 7), (5, 13)])
def test_every_bin_is_seen_once_an_epoch(num_bins, size):
    steps = 2 * num_bins  # a whole number of epochs
    seen = [n for step in range(steps) for n in bins_for_step([num_bins], seed=3, step=step, global_batch_size=size)]
    for epoch in range(steps * size // num_bins):
        assert sorted(seen[epoch * num_bins : (epoch + 1) * num_bins]) == list(range(num_bins))


def test_order_changes_with_seed_and_epoch_and_nothing_else():
    def epoch_of(seed, start):
        return [n for s in range(start, start + 5) for n in bins_for_step([20], seed=seed, step=s, global_batch_size=4)]

    assert epoch_of(1, 0) == epoch_of(1, 0) != epoch_of(2, 0)
    assert epoch_of(1, 0) != epoch_of(1, 5)


def test_planned_epochs_follow_one_another_and_start_over():
    sizes = (4, 7, 2)
    seen = bins_at(sizes, 3, np.arange(2 * 13)).tolist()
    for start in (0, 13):
        assert sorted(seen[start : start + 4]) == [0, 1, 2, 3]
        assert sorted(seen[start + 4 : start + 11]) == list(range(4, 11))
        assert sorted(seen[start + 11 : start + 13]) == [11, 12]
    assert seen[:13] != seen[13:], "another order the second time"
    shuffled = np.random.default_rng(0).permutation(26)
    assert bins_at(sizes, 3, shuffled).tolist() == [seen[place] for place in shuffled]


# A checkpoint's data position


COSTS = CostModel(per_token=1, per_loss_token=2, per_token_squared=0.1, per_patch=3, per_patch_squared=0.2)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Two planned epochs of two partitions, 150 bins each about, out of 3,000 samples."""
    directory = tmp_path_factory.mktemp("plan")
    rng = np.random.default_rng(0)
    entries = []
    for epoch in (0, 1):
        for number in (0, 1):
            bins = np.sort(np.append(rng.integers(0, 70 + epoch, 1500), np.arange(70 + epoch)))
            n = len(bins)
            keys = [f"a/{i:08d}" for i in rng.integers(0, 3000, n)]
            images = rng.integers(0, 3, n)
            columns = {"key": keys, "subset": ["a"] * n, "split": ["train"] * n, "shard": ["train/s.tar"] * n}
            columns |= {"offset": np.zeros(n, int), "size": np.ones(n, int), "checksum": np.zeros(n, np.uint64)}
            columns |= {"num_tokens": rng.integers(1, 99, n).astype(np.int32), "num_loss_tokens": np.ones(n, np.int32)}
            columns |= {"num_patches": (8 * images).astype(np.int32), "num_images": images.astype(np.int32)}
            table = pa.table(columns, schema=INDEX_SCHEMA)
            entries.append(write_bin_partition(directory, "train", epoch, number, table, bins))
    write_bins(directory, entries)
    return directory


class KeyReader:
    """Reads a bin's keys, and takes longer for some bins than for others."""

    def __init__(self, directory) -> None:
        self.bins = read_bins(directory, "train")

    def read(self, number: int) -> SimpleNamespace:
        time.sleep(0.0005 * (number % 3))
        return SimpleNamespace(keys=tuple(ref.key for ref in self.bins[number]))


def keys_of_steps(directory, dp: int, num_workers: int, begin: int, start: int, stop: int) -> list[Counter]:
    """Sample keys of each step from `start` on, of a job that began or was resumed at step `begin`."""
    steps = [Counter() for _ in range(start, stop)]
    for dp_rank in range(dp):
        reader = KeyReader(directory)  # each rank is a process of its own
        cost = partial(COSTS.planned_cost, seq_len=4096)
        order = TrainingOrder(reader, seed=11, global_batch_size=8, dp_rank=dp_rank, dp=dp, bin_cost=cost)
        batches = prefetch(reader, order(begin, stop), depth=4, pin=False, num_workers=num_workers)
        for place, batch in enumerate(batches):
            step = begin + place // (8 // dp)
            if step >= start:
                steps[step - start].update(batch.keys)
    return steps


def test_steps_50_to_60_see_the_same_samples_whatever_runs_them(plan):
    expected = keys_of_steps(plan, dp=1, num_workers=1, begin=0, start=50, stop=61)
    assert len(set(map(str, expected))) == 11 and all(len(step) > 100 for step in expected)
    for dp in (1, 2, 4):
        for num_workers in (1, 2, 5):
            assert keys_of_steps(plan, dp, num_workers, begin=50, start=50, stop=61) == expected, (dp, num_workers)
        assert keys_of_steps(plan, dp, 3, begin=53, start=53, stop=61) == expected[3:], f"resumed, dp={dp}"


def test_tokens_before_a_step_are_those_of_its_bins(plan, monkeypatch):
    monkeypatch.setattr("trainer.data.order._SUMMED_BINS", 50)
    reader = KeyReader(plan)
    order = TrainingOrder(reader, seed=11, global_batch_size=8, dp_rank=0, dp=1)
    tokens = loss_tokens = 0
    for step in range(80):  # more than both epochs
        if step % 9 == 0 or step > 76:
            assert order.tokens_before(step) == (tokens, loss_tokens), step
        for number in order.global_batch(step):
            tokens += sum(ref.num_tokens for ref in reader.bins[number])
            loss_tokens += sum(ref.num_loss_tokens for ref in reader.bins[number])


def test_epochs_are_counted_in_planned_epochs_of_their_own_size():
    order = TrainingOrder(SimpleNamespace(bins=ListedPlan([()] * 10)), seed=0, global_batch_size=2, dp_rank=0, dp=1)
    assert [order.epoch(step) for step in (0, 1, 5, 12)] == [0, 0.2, 1, 2.4]
    order._sizes = (4, 16)
    assert [order.epoch(step) for step in (1, 2, 6, 10, 11)] == [0.5, 1, 1.5, 2, 2.5]


@pytest.mark.parametrize("dp", [65, 128, 200])
def test_more_ranks_than_are_dealt_together_share_the_batch_in_groups(dp, plan):
    cost = partial(COSTS.planned_cost, seq_len=4096)
    orders = [
        TrainingOrder(KeyReader(plan), seed=1, global_batch_size=2 * dp, dp_rank=rank, dp=dp, bin_cost=cost)
        for rank in range(dp)
    ]
    shares = [order.share(3) for order in orders]
    assert {len(share) for share in shares} == {2}
    assert Counter(n for share in shares for n in share) == Counter(orders[0].global_batch(3))


def test_threads_read_at_the_same_time_and_end_with_the_loop():
    earlier = set(threading.enumerate())  # of other loops in this process
    together = threading.Barrier(3, timeout=at_most(20))
    batches = prefetch(SimpleNamespace(read=lambda number: together.wait() * 0 + number), iter(range(30)), 4, False, 3)
    assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4], "three had to read at once"
    together.abort()
    batches.close()
    assert not set(threading.enumerate()) - earlier


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_an_error_is_raised_in_its_place(num_workers):
    def read(number: int) -> int:
        if number == 6:
            raise OSError("the shard is cut short")
        time.sleep(0.001 * (7 - number))
        return number

    seen = []
    with pytest.raises(OSError, match="cut short"):
        for batch in prefetch(SimpleNamespace(read=read), iter(range(20)), 4, False, num_workers):
            seen.append(batch)
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    run = write_job(tmp_path_factory.mktemp("data"), num_steps=4)
    return BinReader(
        run.tokenized_dir, run.bins_dir, "train", geometry_of(read_model(run.hf_dir)[1]), SEQ_LEN, RankSlice()
    )


def test_bins_are_read_as_they_are_planned(reader):
    numbers = [3, 0, 5, 1]
    keys = [batch.keys for batch in prefetch(reader, iter(numbers), depth=2, pin=False)]
    assert keys == [tuple(ref.key for ref in reader.bins[n]) for n in numbers]
    sample = reader.samples(0)[0]
    assert sample.input_ids.dtype == np.int32 and len(sample.input_ids) == reader.bins[0][0].num_tokens
    sample.check()


def test_a_rank_without_vision_gets_everything_but_the_pixels(reader):
    blind = copy.copy(reader)
    blind._part = RankSlice(has_vision=False)
    for number in range(len(reader.bins)):
        for ours, whole in zip(blind.samples(number), reader.samples(number), strict=True):
            assert len(ours.patches) == 0
            for field in ("key", "input_ids", "loss_mask", "image_grid_thw"):
                assert np.array_equal(getattr(ours, field), getattr(whole, field))
