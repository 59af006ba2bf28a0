import copy
import tarfile
from collections import Counter

import numpy as np
import pytest

from tests.helpers.run_dir import SEQ_LEN, write_job
from trainer.data import BinReader, TrainingOrder, bins_for_step, prefetch
from trainer.models.qwen3_vl.config import read_config
from trainer.slices import RankSlice


@pytest.mark.parametrize(("num_bins", "size"), [(10, 4), (3, 4), (7, 7), (5, 13)])
def test_every_bin_is_seen_once_an_epoch(num_bins, size):
    steps = 2 * num_bins  # a whole number of epochs
    seen = [n for step in range(steps) for n in bins_for_step(num_bins, seed=3, step=step, global_batch_size=size)]
    for epoch in range(steps * size // num_bins):
        assert sorted(seen[epoch * num_bins : (epoch + 1) * num_bins]) == list(range(num_bins))


def test_order_changes_with_seed_and_epoch_and_nothing_else():
    def epoch_of(seed, start):
        return [n for s in range(start, start + 5) for n in bins_for_step(20, seed=seed, step=s, global_batch_size=4)]

    assert epoch_of(1, 0) == epoch_of(1, 0) != epoch_of(2, 0)
    assert epoch_of(1, 0) != epoch_of(1, 5)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    run = write_job(tmp_path_factory.mktemp("data"), num_steps=4)
    return BinReader(run.tokenized_dir, run.bins_dir, "train", read_config(run.hf_dir).geometry, SEQ_LEN, RankSlice())


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(reader, dp):
    orders = [TrainingOrder(reader, seed=1, global_batch_size=4, dp_rank=r, dp=dp) for r in range(dp)]
    for step in range(6):
        shares = [list(order(step, step + 1)) for order in orders]
        assert {len(share) for share in shares} == {4 // dp}
        assert Counter(n for share in shares for n in share) == Counter(orders[0].global_batch(step))


def test_prefetch_keeps_the_order_and_raises_the_readers_error(reader):
    numbers = [3, 0, 5, 1]
    keys = [batch.keys for batch in prefetch(reader, iter(numbers), depth=2, pin=False)]
    assert keys == [tuple(ref.key for ref in reader.bins[n]) for n in numbers]
    with pytest.raises(IndexError):
        list(prefetch(reader, iter([0, 99]), depth=2, pin=False))


def test_samples_come_back_as_written(reader):
    sample = reader.samples(0)[0]
    assert sample.input_ids.dtype == np.int32 and len(sample.input_ids) == reader.bins[0][0].num_tokens
    sample.check()


def test_a_rank_without_vision_reads_everything_but_the_pixels(reader, monkeypatch):
    blind = copy.copy(reader)
    blind._part = RankSlice(has_vision=False)
    read = []
    extract = tarfile.TarFile.extractfile
    monkeypatch.setattr(tarfile.TarFile, "extractfile", lambda tar, member: read.append(member) or extract(tar, member))
    for number in range(len(reader.bins)):
        for ours, whole in zip(blind.samples(number), reader.samples(number), strict=True):
            assert len(ours.patches) == 0
            for field in ("key", "input_ids", "loss_mask", "image_grid_thw"):
                assert np.array_equal(getattr(ours, field), getattr(whole, field))
    assert sum("patches" in member.name for member in read) == sum(map(len, reader.bins)), (
        "read for whole samples alone"
    )
