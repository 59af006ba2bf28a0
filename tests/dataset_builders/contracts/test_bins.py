"""The plan on disk: it is read back bin by bin as written, and nothing else is opened."""

import json

import numpy as np
import pyarrow as pa
import pytest

from dataset_builders.contracts.bins import BINS, read_bins, write_bin_partition, write_bins
from dataset_builders.contracts.tokenized import INDEX_SCHEMA
from dataset_builders.errors import DamagedFile, InputError
from tests.helpers.bins import sum_bin

pytestmark = pytest.mark.promise(
    "Bins keep their limits, any step's are found without holding an epoch, and dealing them to ranks by cost, "
    "threads and resumes change none of a step's samples."
)


def _rows(first: int, count: int, split: str) -> list[dict]:
    return [
        {"key": f"a/{i:08d}", "subset": "a", "split": split, "shard": f"{split}/shard-{i % 3:05d}.tar"}
        | {"offset": 512 * i, "size": 512, "checksum": 2**63 + i, "num_tokens": 10 + i, "num_loss_tokens": i}
        | {"num_patches": 12 * (i % 3), "num_images": i % 3}
        for i in range(first, first + count)
    ]


def _write(directory, partitions) -> list[list[dict]]:
    """Write (split, epoch, number, rows, bins) partitions; return the rows of every bin."""
    entries = []
    for split, epoch, number, rows, bins in partitions:
        table = pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
        entries.append(write_bin_partition(directory, split, epoch, number, table, np.array(bins)))
    write_bins(directory, entries)


@pytest.fixture
def plan(tmp_path):
    parts = [("train", 0, 0, _rows(0, 5, "train"), [0, 0, 1, 1, 1]), ("train", 0, 1, _rows(5, 3, "train"), [0, 1, 1])]
    parts += [("train", 1, 0, _rows(0, 4, "train"), [0, 1, 1, 2]), ("heldout", 0, 0, _rows(20, 2, "heldout"), [0, 0])]
    _write(tmp_path, parts)
    return tmp_path


def test_bins_are_numbered_through_partitions_and_epochs(plan):
    bins = read_bins(plan, "train")
    keys = [[int(ref.key[2:]) for ref in bin_] for bin_ in bins]
    assert keys == [[0, 1], [2, 3, 4], [5], [6, 7], [0], [1, 2], [3]]
    assert len(bins) == 7 and bins.epoch_sizes == (4, 3)
    assert bins.epoch_totals == ((sum(range(10, 18)), sum(range(8))), (sum(range(10, 14)), sum(range(4))))
    assert [[ref.key for ref in bin_] for bin_ in read_bins(plan, "heldout")] == [["a/00000020", "a/00000021"]]


def test_a_sample_carries_its_whole_address(plan):
    ref = read_bins(plan, "train")[3][1]
    row = _rows(7, 1, "train")[0]
    assert all(getattr(ref, name) == row[name] for name in ref.__dataclass_fields__)


def test_sums_are_those_of_the_samples(plan):
    bins = read_bins(plan, "train")
    numbers = [6, 0, 3, 3, 1, 5]
    sums = bins.sums(numbers)
    for place, number in enumerate(numbers):
        assert [column[place] for column in sums] == list(sum_bin(bins[number])), number
    assert all(len(column) == 0 for column in bins.sums([]))


def test_only_the_partitions_that_are_asked_are_opened(plan):
    (plan / "bins/train-000-00000.arrow").unlink()
    bins = read_bins(plan, "train")
    assert len(bins) == 7 and len(bins[2]) == 1 and bins.sums([2, 6]).num_samples.tolist() == [1, 1]
    with pytest.raises(DamagedFile, match="is missing"):
        bins[0]


def test_numbers_outside_are_an_error(plan):
    for number in (7, -1):
        with pytest.raises(IndexError, match=f"bin {number} of 7"):
            read_bins(plan, "train")[number]


def test_no_bins_are_an_empty_plan(tmp_path):
    _write(tmp_path, [("train", 0, 0, _rows(0, 1, "train"), [0])])
    heldout = read_bins(tmp_path, "heldout")
    assert len(heldout) == 0 and heldout.epoch_sizes == () and list(heldout) == []


def test_another_format_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"has no bins\.json: .* run the plan_bins stage again"):
        read_bins(tmp_path, "train")
    (tmp_path / BINS).write_text(json.dumps({"format_version": 3, "partitions": []}))
    with pytest.raises(InputError, match=r"format_version is 3, this code reads 2; delete .* run the plan_bins stage"):
        read_bins(tmp_path, "train")
