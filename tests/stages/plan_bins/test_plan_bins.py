"""plan_bins: every sample of the epoch in a bin, no bin over its limit, deterministic; mixtures; partitions."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from dataset_builders.contracts.bins import read_bins
from dataset_builders.contracts.tokenized import index_partitions
from dataset_builders.errors import InputError
from stages.plan_bins.stage import STAGE, PlanBinsConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from tests.helpers.index import read_index, write_index
from tests.helpers.trees import tree_digest
from tests.stages.artifacts import stage_artifact

pytestmark = pytest.mark.promise(
    "Bins keep their limits, any step's are found without holding an epoch, and dealing them to ranks by cost, "
    "threads and resumes change none of a step's samples."
)


def _tokenized(
    directory: Path, rows: list[tuple[str, str, int, int, int]], partition_rows: int = 1_000_000
) -> Artifact:
    """Write a tokenize artifact that has only an index: (key, split, tokens, patches, images) of each row."""
    directory.mkdir(parents=True)
    names = ("key", "split", "num_tokens", "num_patches", "num_images")
    extra = {"size": 10, "num_loss_tokens": 1, "checksum": 7}
    index = [
        {**dict(zip(names, row)), "subset": row[0].partition("/")[0], **extra}
        | {"shard": f"{row[1]}/shard-{i // 50:05d}.tar", "offset": 10 * i}
        for i, row in enumerate(rows)
    ]
    write_index(directory, index, partition_rows)
    return stage_artifact(directory, "tokenize")


def _many(n: int, seed: int = 0) -> list[tuple[str, str, int, int, int]]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        images, split = int(rng.integers(0, 3)), "heldout" if i % 10 == 9 else "train"
        rows.append((f"a/{i:08d}", split, int(rng.integers(5, 60)) + 4 * images, 16 * images, images))
    return sorted(rows, key=lambda row: row[1] == "heldout")


def _plan(tokenized: Artifact, root: Path, workers: int = 1, **config: object) -> Artifact:
    defaults = {"seq_len": 128, "max_patches": 256, "pad_multiple": 1}
    resources = StageResources(num_workers=workers)
    return run_stage(STAGE, PlanBinsConfig(**(defaults | config)), {"tokenized": tokenized}, root, resources).artifact


def test_bins_hold_every_sample_of_their_split_with_its_address(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", _many(200))
    plan = _plan(tokenized, tmp_path / "root")
    rows = {row["key"]: row for row in read_index(tokenized.dir).to_pylist()}
    for split in ("train", "heldout"):
        bins = read_bins(plan.dir, split)
        refs = [ref for bin_ in bins for ref in bin_]
        assert sorted(ref.key for ref in refs) == sorted(key for key, row in rows.items() if row["split"] == split)
        names = ("shard", "offset", "size", "checksum", "num_patches")
        assert all(getattr(ref, name) == rows[ref.key][name] for ref in refs for name in names)
        for bin_ in bins:
            assert sum(ref.num_tokens for ref in bin_) <= 128 and sum(ref.num_patches for ref in bin_) <= 256
            assert [ref.offset for ref in bin_] == sorted(ref.offset for ref in bin_), "a reader only goes forward"


def test_stats_are_the_bins(tmp_path):
    plan = _plan(_tokenized(tmp_path / "tokenized", _many(200)), tmp_path / "root")
    stats = plan.manifest.stats
    assert (stats["seq_len"], stats["max_patches"]) == (128, 256)
    for split in ("train", "heldout"):
        bins = read_bins(plan.dir, split)
        tokens = sum(ref.num_tokens for bin_ in bins for ref in bin_)
        assert stats["num_bins"][split] == len(bins)
        assert stats["padding_fraction"][split] == pytest.approx(1 - tokens / (128 * len(bins)))
        assert stats["samples_per_bin"][split] == pytest.approx(sum(map(len, bins)) / len(bins))
        images = sum(ref.num_images for bin_ in bins for ref in bin_)
        assert stats["images_per_bin"][split] == pytest.approx(images / len(bins))
    assert stats["padding_fraction"]["train"] < 0.03


def test_lengths_are_rounded_up_before_packing(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", _many(200))
    plan = _plan(tokenized, tmp_path / "root", pad_multiple=16)
    for bin_ in read_bins(plan.dir, "train"):
        assert sum(-(-ref.num_tokens // 16) * 16 for ref in bin_) <= 128


def test_the_same_index_gives_the_same_bytes(tmp_path):
    first = _plan(_tokenized(tmp_path / "one", _many(300)), tmp_path / "root-1")
    second = _plan(_tokenized(tmp_path / "two", _many(300)), tmp_path / "root-2")
    assert tree_digest(first.dir) == tree_digest(second.dir)


def test_what_fits_no_bin_is_left_out_and_named(tmp_path):
    rows = [("a/00000000", "train", 129, 0, 0), ("a/00000001", "train", 90, 257, 1)]
    rows += [("a/00000002", "train", 128, 256, 1)]
    plan = _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root")
    assert plan.manifest.skips == {"over_length": 1, "too_many_patches": 1}
    lines = [json.loads(line) for line in (plan.dir / "quarantine.jsonl").read_text().splitlines()]
    left_out = [("a/00000000", "over_length"), ("a/00000001", "too_many_patches")]
    assert [(line["key"], line["reason"]) for line in lines] == left_out
    assert [[ref.key for ref in bin_] for bin_ in read_bins(plan.dir, "train")] == [["a/00000002"]]
    assert "a/00000001" in (plan.dir / "report.html").read_text()


def test_rounding_can_make_a_sample_too_long(tmp_path):
    rows = [("a/00000000", "train", 97, 0, 0), ("a/00000001", "train", 96, 0, 0)]
    plan = _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root", seq_len=96, pad_multiple=32)
    assert plan.manifest.skips == {"over_length": 1}


def test_no_heldout_samples_are_no_bins(tmp_path):
    plan = _plan(_tokenized(tmp_path / "tokenized", [("a/00000000", "train", 10, 0, 0)]), tmp_path / "root")
    assert plan.manifest.stats["num_bins"] == {"train": 1, "heldout": 0}
    assert len(read_bins(plan.dir, "heldout")) == 0


def test_nothing_to_train_on_is_an_error(tmp_path):
    rows = [("a/00000000", "train", 500, 0, 0), ("a/00000001", "heldout", 5, 0, 0)]
    with pytest.raises(InputError, match=r"no sample of the train split fits a bin \(seq_len=128"):
        _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root")


def test_seq_len_must_hold_whole_multiples():
    with pytest.raises(ValidationError, match="seq_len=100 is not a multiple of pad_multiple=16; try 96"):
        PlanBinsConfig(seq_len=100, max_patches=1, pad_multiple=16)


def test_a_sample_with_too_many_images_is_left_out(tmp_path):
    rows = [("a/00000000", "train", 20, 16, 3), ("a/00000001", "train", 20, 16, 2), ("a/00000002", "train", 5, 16, 1)]
    plan = _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root", max_images=2)
    assert plan.manifest.skips == {"too_many_images": 1}
    assert "3 images, max_images is 2" in (plan.dir / "quarantine.jsonl").read_text()
    bins = read_bins(plan.dir, "train")
    assert sorted(ref.key for bin_ in bins for ref in bin_) == ["a/00000001", "a/00000002"]
    assert max(sum(ref.num_images for ref in bin_) for bin_ in bins) == 2 and len(bins) == 2


# Partitions


@pytest.mark.full
def test_partitions_are_planned_by_themselves_with_any_number_of_workers(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", _many(500), partition_rows=200)
    assert len(index_partitions(tokenized.dir)) == 3
    mixture = {"a": {"repeats": 0.6}}
    plan = _plan(tokenized, tmp_path / "one", mixture=mixture, epochs=2)
    # 450 training samples in shards of 50, then the held-out samples: the third partition holds both
    names = {path.name for path in (plan.dir / "bins").iterdir()}
    train = {f"train-{epoch:03d}-{part:05d}.arrow" for epoch in (0, 1) for part in (0, 1, 2)}
    assert names == train | {"heldout-000-00002.arrow"}
    again = _plan(tokenized, tmp_path / "two", workers=2, mixture=mixture, epochs=2)
    assert tree_digest(plan.dir) == tree_digest(again.dir)
    places = {row["key"]: number // 200 for number, row in enumerate(read_index(tokenized.dir).to_pylist())}
    for bin_ in read_bins(plan.dir, "train"):
        assert len({places[ref.key] for ref in bin_}) == 1, "a bin is planned out of one partition"


def test_partitioning_changes_bins_and_not_what_is_trained_on(tmp_path):
    found = []
    for rows in (10_000, 150):
        tokenized = _tokenized(tmp_path / f"tokenized-{rows}", _many(500), partition_rows=rows)
        plan = _plan(tokenized, tmp_path / f"root-{rows}", mixture={"a": {"repeats": 0.4, "fraction": 0.7}}, epochs=3)
        found.append([_keys(plan, epoch) for epoch in range(3)])
        assert plan.manifest.stats["num_epochs"] == {"train": 3, "heldout": 1}
    assert found[0] == found[1]


# Mixtures


def _keys(plan: Artifact, epoch: int) -> list[str]:
    """Return the keys of one planned epoch, sorted."""
    bins = read_bins(plan.dir, "train")
    first = sum(bins.epoch_sizes[:epoch])
    return sorted(ref.key for number in range(first, first + bins.epoch_sizes[epoch]) for ref in bins[number])


def _two_subsets(n: int) -> list[tuple[str, str, int, int, int]]:
    rows = [(f"{'ab'[i % 2]}{key[1:]}", *rest) for i, (key, *rest) in enumerate(_many(n))]
    return sorted(rows, key=lambda row: row[1] == "heldout")


def test_the_plan_holds_what_the_mixture_says_and_the_report_shows_it(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", _two_subsets(400))
    mixture = {"a": {"repeats": 2.5}, "b": {"fraction": 0.5}}
    plan = _plan(tokenized, tmp_path / "root", mixture=mixture, epochs=2)
    all_of_a = {r["key"] for r in read_index(tokenized.dir).to_pylist() if r["subset"] == "a" and r["split"] == "train"}
    epochs = [Counter(_keys(plan, epoch)) for epoch in (0, 1)]
    for epoch in epochs:
        of_a = {key: count for key, count in epoch.items() if key.startswith("a")}
        assert of_a.keys() == all_of_a and set(of_a.values()) == {2, 3}
    assert all(epochs[0][key] + epochs[1][key] == 5 for key in all_of_a)
    of_b = [{key for key in epoch if key.startswith("b")} for epoch in epochs]
    assert of_b[0] == of_b[1] and all(epochs[0][key] == 1 for key in of_b[0])
    stats = plan.manifest.stats
    for number, epoch in enumerate(epochs):
        shown = stats["epochs"][number]["subsets"]
        assert shown["a"]["num_samples"] == sum(count for key, count in epoch.items() if key.startswith("a"))
        assert shown["b"]["num_used"] == len(of_b[0]) and shown["b"]["num_available"] > len(of_b[0])
        assert sum(subset["token_fraction"] for subset in shown.values()) == pytest.approx(1)
    assert stats["num_samples"]["train"] == round((epochs[0].total() + epochs[1].total()) / 2)
    page = (plan.dir / "report.html").read_text()
    assert "What each subset contributes, epoch 2 of 2" in page


@pytest.mark.parametrize(("samples", "repeats", "at_a_time"), [(400, 6, 10**6), (400, 2, 10**6), (2000, 2.5, 1000)])
def test_no_copy_meets_another_of_its_sample_in_a_bin(samples, repeats, at_a_time, tmp_path, monkeypatch):
    monkeypatch.setattr("stages.plan_bins.partition._AT_A_TIME", at_a_time)
    tokenized = _tokenized(tmp_path / "tokenized", _many(samples))
    plan = _plan(tokenized, tmp_path / "root", mixture={"a": {"repeats": repeats}})
    assert len(_keys(plan, 0)) == round(repeats * 0.9 * samples)
    assert all(len({ref.key for ref in bin_}) == len(bin_) for bin_ in read_bins(plan.dir, "train"))
    assert plan.manifest.stats["copies_in_one_bin"] == 0
    assert plan.manifest.stats["padding_fraction"]["train"] < 0.03


def test_copies_that_must_meet_are_counted(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", [("a/00000000", "train", 10, 0, 0)])
    plan = _plan(tokenized, tmp_path / "root", mixture={"a": {"repeats": 4}})
    assert plan.manifest.stats["copies_in_one_bin"] == 3 and plan.manifest.stats["num_bins"]["train"] == 1


def test_held_out_samples_come_once_whatever_the_mixture_says(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", _two_subsets(200))
    plan = _plan(tokenized, tmp_path / "root", mixture={"a": {"repeats": 3.5}, "b": {"fraction": 0.1}}, epochs=4)
    keys = sorted(ref.key for bin_ in read_bins(plan.dir, "heldout") for ref in bin_)
    assert keys == sorted(r["key"] for r in read_index(tokenized.dir).to_pylist() if r["split"] == "heldout")


def test_a_misspelt_subset_is_an_error_before_anything_is_planned(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", [("chartqa/00000000", "train", 10, 0, 0)])
    with pytest.raises(InputError, match=r"plan_bins\.mixture\.chart_qa: .* did you mean chartqa\?"):
        _plan(tokenized, tmp_path / "root", mixture={"chart_qa": {"repeats": 2}})
