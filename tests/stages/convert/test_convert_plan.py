"""The plan compared with slow, obvious versions of it."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataset_builders.contracts.sample import SPLITS
from dataset_builders.errors import InputError
from stages.convert.plan import DUPLICATE, LEFT_OUT, Draw, Plan, check_heldout, make_plan, split_of
from stages.convert.rows import RawRows
from stages.convert.scan import PLAN_COLUMNS, SCAN_SCHEMA, Scan
from stages.convert.write import write_tasks
from tests.bench.bench_convert import synthetic_scan

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)


def digest(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def scan_of(samples: list[list[int]], sizes: list[int] | None = None, digests: list[int] | None = None) -> Scan:
    """Return samples, given by the numbers of their images, five per part, as the scan that the plan reads."""
    count = len(samples)
    kind = SCAN_SCHEMA.field("pictures").type
    table = pa.table(
        {
            "key": pa.array([f"s/{i:08d}" for i in range(count)], pa.large_string()),
            "reason": pa.nulls(count, pa.string()),
            "detail": pa.nulls(count, pa.large_string()),
            "digest": pa.array([digest(10**6 + i) for i in digests or range(count)], pa.binary(32)),
            "size": pa.array(sizes or [100] * count, pa.int64()),
            "pictures": pa.array([[{"sha256": digest(i)} for i in pictures] for pictures in samples], kind),
        }
    )
    parts = [table.slice(begin, 5) for begin in range(0, count, 5)]
    return Scan(pa.concat_tables(parts), np.array([*range(0, count, 5), count]))


def plan_of(
    scan: Scan, seed: int, heldout_fraction: float, shard_bytes: int, own: list | None = None, least: int = 0
) -> Plan:
    draw = Draw(seed=seed, heldout_fraction=heldout_fraction, min_heldout=least)
    return make_plan(scan, own or [None] * (len(scan.starts) - 1), draw, shard_bytes)


def named(plan: Plan) -> list[str]:
    return [SPLITS[place] if place != LEFT_OUT else "-" for place in plan.splits]


def slow_groups(samples: list[list[int]]) -> list[set[int]]:
    """Return for each sample every image connected to it, by passing over all samples until nothing changes."""
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
    plan = plan_of(scan_of(samples), seed, 0.4, 10**6)
    for i, group in enumerate(slow_groups(samples)):
        name = min(map(digest, group)) if group else digest(10**6 + i)
        assert named(plan)[i] == split_of(seed, name, 0.4)


@pytest.mark.parametrize("seed", range(30))
def test_the_sources_own_splits_match_the_slow_version(seed):
    """A group that any part puts in heldout is heldout, else train if a part puts it there, else drawn."""
    rng = random.Random(seed)
    samples = [rng.sample(range(40), rng.choice([0, 1, 1, 2])) for _ in range(30)]
    own = [rng.choice([None, None, "train", "heldout"]) for _ in range(6)]
    plan = plan_of(scan_of(samples), seed, 0.5, 10**6, own)
    for i, group in enumerate(slow_groups(samples)):
        said = {own[j // 5] for j, pictures in enumerate(samples) if set(pictures) & group or j == i}
        drawn = split_of(seed, min(map(digest, group)) if group else digest(10**6 + i), 0.5)
        expected = "heldout" if "heldout" in said else "train" if "train" in said else drawn
        assert named(plan)[i] == expected, said


@pytest.mark.parametrize("pictures", [[7], []])
def test_a_sample_in_both_of_the_sources_splits_is_heldout_once(pictures):
    """The first sample stays, but is not trained on, because the source holds the same sample out."""
    samples, digests = [[0], [1], [2], [3], pictures, pictures, [4]], [0, 1, 2, 3, 4, 4, 5]
    plan = plan_of(scan_of(samples, digests=digests), 0, 0.0, 10**6, ["train", "heldout"])
    assert named(plan) == ["train"] * 4 + ["heldout", "-", "heldout"]
    assert plan.skips() == {"duplicate_sample": 1} and plan.firsts.tolist() == [0, 1, 2, 3, 4, 4, 6]


@pytest.mark.parametrize("seed", range(30))
def test_small_data_meets_the_least_number_held_out(seed):
    """Samples held out by the share stay so; then the smallest draws follow, and train keeps at least as many
    samples."""
    rng = random.Random(seed)
    samples = [rng.sample(range(100), rng.choice([0, 1, 1, 2])) for _ in range(60)]
    scan = scan_of(samples, digests=[*range(50), *range(10)])  # at most ten duplicates, not counted as samples
    by_share, met = (named(plan_of(scan, seed, 0.1, 10**6, least=least)) for least in (0, 20))
    assert 20 <= met.count("heldout") <= met.count("train") and by_share.count("heldout") < 20
    assert all(after == "heldout" for before, after in zip(by_share, met) if before == "heldout")
    assert named(plan_of(scan, seed, 0.1, 10**6, least=by_share.count("heldout"))) == by_share
    alone = [i for i, images in enumerate(samples) if not images and i < 50]
    held = [i for i in alone if met[i] == "heldout"]
    tickets = {i: min(share for share in np.linspace(0, 1, 500) if drawn_at(seed, i, share)) for i in alone}
    assert not held or max(tickets[i] for i in held) <= min([tickets[i] for i in alone if i not in held], default=1)


def drawn_at(seed: int, sample: int, share: float) -> bool:
    return split_of(seed, digest(10**6 + sample), share) == "heldout"


def test_a_large_group_does_not_take_all_to_meet_the_least_number():
    samples = [[0]] * 15 + [[i] for i in range(1, 16)]
    for seed in range(10):
        plan = plan_of(scan_of(samples), seed, 0.001, 10**6, least=14)
        assert named(plan).count("heldout") in (14, 15)


def test_data_too_small_for_the_least_number_is_an_error():
    draw, own = Draw(seed=0, heldout_fraction=0.1, min_heldout=6), [None, None, None]
    check_heldout(plan_of(scan_of([[i] for i in range(12)]), 0, 0.1, 10**6, least=6), own, draw)
    plan = plan_of(scan_of([[i] for i in range(11)]), 0, 0.1, 10**6, least=6)
    words = r"convert\.min_heldout=6: of 11 usable samples only 5 can be held out .* lower"
    with pytest.raises(InputError, match=words):
        check_heldout(plan, own, draw)
    check_heldout(plan, ["train"] * 3, draw)  # the source's own split
    check_heldout(plan, own, Draw(seed=0, heldout_fraction=0, min_heldout=6))


def test_split_of_is_pinned():
    """A change of this function would move images between the splits of data that people have already trained on."""
    drawn = "".join(split_of(7, bytes([i]) * 32, 0.5)[0] for i in range(16))
    assert drawn == "tttttthhhhhhhtth"


def test_shards_cut_where_the_next_sample_would_not_fit():
    sizes = [60, 30, 10, 1, 500, 50, 50, 1]
    scan = scan_of([[] for _ in sizes], sizes)
    plan = plan_of(scan, 0, 0.0, 100)
    assert [shard.rows.tolist() for shard in plan.shards] == [[0, 1, 2], [3], [4], [5, 6], [7]]
    source = RawRows(parts={0: None, 1: None}, readers={0: None, 1: None})
    tasks = list(write_tasks(Path("work"), scan, plan, source))
    places = [{number: rows.tolist() for number, rows in task.rows.items()} for task in tasks]
    assert places == [{0: [0, 1, 2]}, {0: [3]}, {0: [4]}, {1: [0, 1]}, {1: [2]}]
    assert [list(task.source.parts) for task in tasks] == [[0], [0], [0], [1], [1]]


def test_a_shard_over_several_parts_knows_each_ones_rows():
    scan = scan_of([[] for _ in range(12)])
    source = RawRows(parts=dict.fromkeys(range(3)), readers=dict.fromkeys(range(3)))
    (task,) = write_tasks(Path("work"), scan, plan_of(scan, 0, 0.0, 10**6), source)
    rows_of = {number: rows.tolist() for number, rows in task.rows.items()}
    assert rows_of == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4], 2: [0, 1]}


def test_nothing_and_nothing_usable():
    assert plan_of(Scan(SCAN_SCHEMA.empty_table().select(PLAN_COLUMNS), np.array([0])), 0, 0.5, 100).shards == []
    scan = scan_of([[1], []])
    bad = scan.table.set_column(1, "reason", pa.array(["bomb", "no_text"]))
    for name in ("digest", "size", "pictures"):
        bad = bad.set_column(bad.schema.get_field_index(name), name, pa.nulls(2, bad.schema.field(name).type))
    plan = plan_of(Scan(bad, scan.starts), 0, 0.5, 100)
    assert plan.shards == [] and plan.skips() == {"bomb": 1, "no_text": 1} and not plan.kept.any()


def test_memory_a_row_is_bounded():
    """200,000 rows of two images: memory of the plan in addition to the scan, by tracemalloc and Arrow's own count."""
    scan = synthetic_scan(200_000)
    assert scan.table.nbytes / len(scan) < 250
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    plan = make_plan(scan, [None] * (len(scan.starts) - 1), Draw(seed=0, heldout_fraction=0.05), 10**8)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / len(scan) < 400 and kept / len(scan) < 40, (peak / len(scan), kept / len(scan))
    assert pa.total_allocated_bytes() - before < 10 * len(scan)
    assert sum(len(shard.rows) for shard in plan.shards) == plan.kept.sum() == 200_000 - plan.skips()[DUPLICATE]
