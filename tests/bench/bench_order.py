"""The cost of finding the bins of a step, with 100 million bins and 4,096 data-parallel ranks.

    python -m tests.bench.bench_order

The order is computed for its real size. The plan has its real number of partitions, but only one partition of real size
is on disk, under every name. Its pages are in memory, so the time of a disk or network for cold reads must be added.
Memory is the growth of the process since the imports. The first steps of a process open the partitions that they need.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.bins import BinPartition, read_bins, write_bin_partition, write_bins
from dataset_builders.contracts.permutation import KeyedPermutation
from dataset_builders.contracts.tokenized import INDEX_SCHEMA
from tests.bench.memory import memory
from trainer.data.balance import CostModel
from trainer.data.order import TrainingOrder, bins_for_step

COSTS = CostModel(per_token=1, per_loss_token=2, per_token_squared=0.1, per_patch=3, per_patch_squared=0.2)
SAMPLES_OF_A_PARTITION = 1_000_000
SAMPLES_OF_A_BIN = 9


def write_real_partition(directory: Path) -> BinPartition:
    """A million samples in bins of nine."""
    n = SAMPLES_OF_A_PARTITION
    rng = np.random.default_rng(0)
    images = rng.integers(0, 3, n).astype(np.int32)
    columns = {
        "key": [f"subset/{i:08d}" for i in range(n)],
        "subset": ["subset"] * n,
        "split": ["train"] * n,
        "shard": [f"train/shard-{i // 5000:05d}.tar" for i in range(n)],
        "offset": np.arange(n) * 10**6,
        "size": np.full(n, 10**6),
        "checksum": rng.integers(0, 2**63, n).astype(np.uint64),
        "num_tokens": rng.integers(100, 1700, n).astype(np.int32),
        "num_loss_tokens": np.full(n, 100, np.int32),
        "num_patches": 400 * images,
        "num_images": images,
    }
    table = pa.table(columns, schema=INDEX_SCHEMA)
    return write_bin_partition(directory, "train", 0, 0, table, np.arange(n) // SAMPLES_OF_A_BIN)


def write_large_plan(directory: Path, num_bins: int) -> None:
    """Write bins.json of a plan with at least `num_bins` bins. Its partitions are one file under many names."""
    real = write_real_partition(directory)
    parts = []
    for number in range(-(-num_bins // real.num_bins)):
        name = f"bins/train-000-{number:05d}.arrow"
        if number:
            os.link(directory / real.name, directory / name)
        parts.append(real.model_copy(update={"name": name}))
    write_bins(directory, parts)


def timed(function: Callable[[int], object], steps: range) -> tuple[float, float, float]:
    """Return the milliseconds of the first step, and the median and the largest of the other steps."""
    seconds = []
    for step in steps:
        started = time.perf_counter()
        function(step)
        seconds.append(1000 * (time.perf_counter() - started))
    return seconds[0], statistics.median(seconds[1:]), max(seconds[1:])


def print_order(num_bins: int, ranks: int, each: int) -> None:
    """Print the figures of the order alone, which needs only the plan's size."""
    before = memory()
    print("| what | first, ms | median, ms | largest, ms | memory gained, MB |")
    print("| --- | ---: | ---: | ---: | ---: |")
    plan = SimpleNamespace(epoch_sizes=(num_bins,), __len__=lambda: num_bins)
    order = TrainingOrder(
        SimpleNamespace(bins=plan), seed=1, global_batch_size=ranks * each, dp_rank=ranks - 1, dp=ranks
    )
    steps = range(10**6, 10**6 + 200)
    cases = {
        f"the {ranks * each:,} bins of a step": partial(_whole, num_bins, ranks * each),
        f"one rank's {each} of them": order.share,
    }
    for name, function in cases.items():
        first, median, largest = timed(function, steps)
        print(f"| {name} | {first:.2f} | {median:.2f} | {largest:.2f} | {(memory() - before) / 1e6:.0f} |")


def _whole(num_bins: int, size: int, step: int) -> list[int]:
    return bins_for_step([num_bins], seed=1, step=step, global_batch_size=size)


def print_plan(directory: Path, ranks: int, each: int) -> None:
    """Print the figures of the order, the deal by cost and the samples of one rank's bins, from a plan on disk."""
    before = memory("VmRSS")
    started = time.perf_counter()
    reader = SimpleNamespace(bins=read_bins(directory, "train"))
    print(f"| bins.json read: {len(reader.bins.partitions):,} partitions, {len(reader.bins):,} bins ", end="")
    print(f"| {1000 * (time.perf_counter() - started):.2f} | | | {(memory('VmRSS') - before) / 1e6:.0f} |")
    cost = partial(COSTS.planned_cost, seq_len=8192)
    batch = {"global_batch_size": ranks * each, "dp_rank": 77, "dp": ranks}
    orders = {
        "dealt like cards": TrainingOrder(reader, seed=1, **batch),
        "dealt by cost in its group of 64 ranks": TrainingOrder(reader, seed=1, **batch, bin_cost=cost),
    }
    for name, order in orders.items():
        share, samples = timed(order.share, range(5000, 5200)), timed(partial(_samples, order), range(6000, 6200))
        for what, (first, median, largest) in ((name, share), (f"{name}, and the samples of its bins", samples)):
            print(f"| {what} | {first:.2f} | {median:.2f} | {largest:.2f} | {(memory('VmRSS') - before) / 1e6:.0f} |")


def _samples(order: TrainingOrder, step: int) -> list:
    return [order.reader.bins[number] for number in order.share(step)]


def check_permutations(num_bins: int) -> None:
    """Check that every bin occurs once per epoch: all bins of each small plan, and samples of the large one."""
    for size in range(1, 2000):
        assert np.array_equal(np.sort(KeyedPermutation(size, [1, 0])(np.arange(size))), np.arange(size)), size
    places = np.random.default_rng(0).choice(num_bins, 2_000_000, replace=False)
    found = KeyedPermutation(num_bins, [1, 0])(places)
    assert found.min() >= 0 and found.max() < num_bins and len(np.unique(found)) == len(places)
    sampled = f"{len(places):,} places of {num_bins:,}, no bin twice"
    print(f"\nEvery bin once an epoch: all of it for 1 to 1,999 bins; {sampled}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--each", type=int, default=8, help="bins a rank and step")
    args = parser.parse_args()
    print(f"{args.bins:,} bins, {args.ranks:,} ranks, {args.each} bins a rank; ", end="")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, pyarrow {pa.__version__}.\n")
    print_order(args.bins, args.ranks, args.each)
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
        child = os.fork()  # a new process, which did not hold the partition while it was made
        if child == 0:
            write_large_plan(Path(folder), args.bins)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print_plan(Path(folder), args.ranks, args.each)
    check_permutations(args.bins)


if __name__ == "__main__":
    main()
