"""The plan against slow, obvious versions of itself."""

import random

import numpy as np
import pyarrow as pa
import pytest

from stages.convert_plan import make_plan, split_of


def digest(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def scan_table(samples: list[list[int]], sizes: list[int] | None = None) -> pa.Table:
    """Samples by the numbers of their pictures, as the columns of a scan that the plan reads."""
    return pa.table(
        {
            "key": [f"s/{i:08d}" for i in range(len(samples))],
            "reason": pa.array([None] * len(samples), pa.string()),
            "detail": pa.array([None] * len(samples), pa.string()),
            "digest": pa.array([digest(10**6 + i) for i in range(len(samples))], pa.binary(32)),
            "size": pa.array(sizes or [100] * len(samples), pa.int64()),
            "images": pa.array([[digest(i) for i in images] for images in samples], pa.list_(pa.binary(32))),
            "part": pa.array([i // 5 for i in range(len(samples))], pa.int32()),
        }
    )


def slow_groups(samples: list[list[int]]) -> list[set[int]]:
    """For each sample every picture it is tied to, by going over all samples until nothing changes."""
    groups = [set(images) for images in samples]
    changed = True
    while changed:
        changed = False
        for a in groups:
            for b in groups:
                if a & b and a != b:
                    a |= b
                    changed = True
    return groups


@pytest.mark.parametrize("seed", range(30))
def test_splits_match_the_slow_version(seed):
    rng = random.Random(seed)
    samples = [rng.sample(range(25), rng.choice([0, 1, 1, 2, 3])) for _ in range(20)]
    plan = make_plan(scan_table(samples), seed, 0.4, 10**6)
    for i, group in enumerate(slow_groups(samples)):
        name = min(map(digest, group)) if group else digest(10**6 + i)
        assert plan.splits[i] == split_of(seed, name, 0.4)


def test_split_of_is_pinned():
    """A change of this function would move pictures between splits of data that people already trained on."""
    drawn = "".join(split_of(7, bytes([i]) * 32, 0.5)[0] for i in range(16))
    assert drawn == "tttttthhhhhhhtth"


def test_shards_cut_where_the_next_sample_would_not_fit():
    sizes = [60, 30, 10, 1, 500, 50, 50, 1]
    plan = make_plan(scan_table([[] for _ in sizes], sizes), 0, 0.0, 100)
    assert [[key[-1] for keys in shard.keys.values() for key in keys] for shard in plan.shards] == [
        ["0", "1", "2"],
        ["3"],
        ["4"],
        ["5", "6"],
        ["7"],
    ]
    assert [list(shard.keys) for shard in plan.shards] == [[0], [0], [0], [1], [1]]


def test_every_kept_sample_is_in_one_shard_of_its_split():
    samples = [[i // 2] for i in range(200)]
    plan = make_plan(scan_table(samples), 3, 0.3, 1500)
    placed = {key: shard.split for shard in plan.shards for keys in shard.keys.values() for key in keys}
    assert placed == {f"s/{i:08d}": split for i, split in enumerate(plan.splits)}
    assert sum(shard.num_samples for shard in plan.shards) == 200 and len(set(np.array(plan.splits))) == 2
