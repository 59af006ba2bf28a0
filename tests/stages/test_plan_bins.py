"""plan_bins: every sample in one bin, no bin over its room in either dimension, nearly full, always the same."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from dataset_builders.contracts.bins import read_bins
from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.tokenized import read_index, write_index
from stages.artifact import Artifact, run_stage
from stages.plan_bins import STAGE, PlanBinsConfig, pack
from tests.bench.bench_plan_bins import lengths
from tests.helpers.trees import tree_digest


def _check(bins: np.ndarray, tokens: np.ndarray, patches: np.ndarray, seq_len: int, max_patches: int) -> int:
    count = int(bins.max()) + 1
    assert len(bins) == len(tokens) and np.array_equal(np.unique(bins), np.arange(count))
    assert np.bincount(bins, tokens).max() <= seq_len and np.bincount(bins, patches).max() <= max_patches
    return count


def _first_fit(tokens: np.ndarray, patches: np.ndarray, seq_len: int, max_patches: int) -> int:
    """Bins that the textbook needs: longest first, each into the first bin that has room."""
    room: list[list[int]] = []
    for i in np.argsort(-tokens, kind="stable").tolist():
        bin_ = next((b for b in room if b[0] >= tokens[i] and b[1] >= patches[i]), None)
        if bin_ is None:
            room.append(bin_ := [seq_len, max_patches])
        bin_[0] -= int(tokens[i])
        bin_[1] -= int(patches[i])
    return len(room)


@pytest.mark.parametrize("seed", range(20))
def test_never_over_and_not_worse_than_first_fit(seed):
    rng = np.random.default_rng(seed)
    n, seq_len, max_patches = int(rng.integers(1, 300)), int(rng.integers(1, 200)), int(rng.integers(1, 500))
    tokens = rng.integers(1, seq_len + 1, n)
    patches = rng.integers(0, max_patches + 1, n) * rng.integers(0, 2, n)
    count = _check(pack(tokens, patches, seq_len, max_patches), tokens, patches, seq_len, max_patches)
    bound = max(-(-tokens.sum() // seq_len), -(-patches.sum() // max_patches))
    assert bound <= count <= _first_fit(tokens, patches, seq_len, max_patches) * 1.1 + 1


@pytest.mark.parametrize("kind", ["text", "one image", "mixed"])
@pytest.mark.parametrize("max_patches", [32_768, 16_384])
def test_bins_are_over_99_percent_full(kind, max_patches):
    tokens, patches = lengths(kind, 20_000, 8192, 16, seed=1)
    patches = patches.clip(max=max_patches)
    count = _check(pack(tokens, patches, 8192, max_patches), tokens, patches, 8192, max_patches)
    assert max(tokens.sum() / (count * 8192), patches.sum() / (count * max_patches)) > 0.99


def test_equal_lengths_by_hand():
    assert sorted(pack(np.array([4, 4, 4, 4]), np.zeros(4, int), 8, 1).tolist()) == [0, 0, 1, 1]
    assert pack(np.array([3, 6, 8, 2, 5]), np.zeros(5, int), 8, 1).tolist() == [2, 1, 0, 1, 2]
    by_patches = pack(np.array([1, 1, 1]), np.array([4, 4, 4]), 100, 8)
    assert sorted(by_patches.tolist()) == [0, 0, 1], "patches fill up first"
    assert pack(np.zeros(0, int), np.zeros(0, int), 8, 8).tolist() == []


def test_bins_mix_kinds_of_samples_whose_lengths_differ():
    """Short texts and longer pictures: sorted by length alone, most bins would hold one kind."""
    rng = np.random.default_rng(0)
    is_text = rng.random(5000) < 0.5
    tokens = np.where(is_text, rng.integers(20, 40, 5000), rng.integers(70, 120, 5000))
    patches = np.where(is_text, 0, 4 * 60)
    bins = pack(tokens, patches, 2048, 8192)
    count = _check(bins, tokens, patches, 2048, 8192)
    share = np.bincount(bins, is_text) / np.bincount(bins)
    assert ((share > 0.2) & (share < 0.8)).mean() > 0.95
    assert tokens.sum() / (count * 2048) > 0.99


def test_fast_enough_for_a_large_index():
    tokens, patches = lengths("mixed", 100_000, 8192, 1, seed=0)
    started = time.perf_counter()
    pack(tokens, patches, 8192, 32_768)
    assert time.perf_counter() - started < 10, "took about 0.5 s when it was written"


def _tokenized(directory: Path, rows: list[tuple[str, str, int, int, int]]) -> Artifact:
    """An artifact of the tokenize stage that has an index alone: (key, split, tokens, patches, images) of each row."""
    directory.mkdir(parents=True)
    names = ("key", "split", "num_tokens", "num_patches", "num_images")
    extra = {"size": 10, "num_loss_tokens": 1}
    write_index(
        directory,
        [
            {**dict(zip(names, row)), "subset": row[0].partition("/")[0], "shard": f"{row[1]}/shard-00000.tar", **extra}
            | {"offset": 10 * i}
            for i, row in enumerate(rows)
        ],
    )
    Manifest(stage="tokenize", version=1, fingerprint="0" * 16, config={}, parents={}).write(directory)
    return Artifact.load(directory)


def _many(n: int, seed: int = 0) -> list[tuple[str, str, int, int, int]]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        images = int(rng.integers(0, 3))
        patches = 16 * images
        rows.append(
            (
                f"a/{i:08d}",
                "heldout" if i % 10 == 9 else "train",
                int(rng.integers(5, 60)) + patches // 4,
                patches,
                images,
            )
        )
    return sorted(rows, key=lambda row: row[1] == "heldout")


def _plan(tokenized: Artifact, root: Path, **config: int) -> Artifact:
    defaults = {"seq_len": 128, "max_patches": 256, "pad_multiple": 1}
    return run_stage(STAGE, PlanBinsConfig(**(defaults | config)), {"tokenized": tokenized}, root).artifact


def test_bins_hold_every_sample_of_their_split_with_its_address(tmp_path):
    tokenized = _tokenized(tmp_path / "tokenized", _many(200))
    plan = _plan(tokenized, tmp_path / "root")
    rows = {row["key"]: row for row in read_index(tokenized.dir).to_pylist()}
    for split in ("train", "heldout"):
        bins = read_bins(plan.dir, split)
        refs = [ref for bin_ in bins for ref in bin_]
        assert sorted(ref.key for ref in refs) == sorted(key for key, row in rows.items() if row["split"] == split)
        for ref in refs:
            assert all(getattr(ref, name) == rows[ref.key][name] for name in ("shard", "offset", "size", "num_patches"))
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
    rows = [
        ("a/00000000", "train", 129, 0, 0),
        ("a/00000001", "train", 90, 257, 1),
        ("a/00000002", "train", 128, 256, 1),
    ]
    plan = _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root")
    assert plan.manifest.skips == {"over_length": 1, "too_many_patches": 1}
    lines = [json.loads(line) for line in (plan.dir / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["key"], line["reason"]) for line in lines] == [
        ("a/00000000", "over_length"),
        ("a/00000001", "too_many_patches"),
    ]
    assert [[ref.key for ref in bin_] for bin_ in read_bins(plan.dir, "train")] == [["a/00000002"]]
    assert "a/00000001" in (plan.dir / "report.html").read_text()


def test_rounding_can_make_a_sample_too_long(tmp_path):
    rows = [("a/00000000", "train", 97, 0, 0), ("a/00000001", "train", 96, 0, 0)]
    plan = _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root", seq_len=96, pad_multiple=32)
    assert plan.manifest.skips == {"over_length": 1}


def test_no_heldout_samples_are_no_bins(tmp_path):
    plan = _plan(_tokenized(tmp_path / "tokenized", [("a/00000000", "train", 10, 0, 0)]), tmp_path / "root")
    assert plan.manifest.stats["num_bins"] == {"train": 1, "heldout": 0}
    assert read_bins(plan.dir, "heldout") == []


def test_nothing_to_train_on_is_an_error(tmp_path):
    rows = [("a/00000000", "train", 500, 0, 0), ("a/00000001", "heldout", 5, 0, 0)]
    with pytest.raises(InputError, match=r"no sample of the train split fits a bin \(seq_len=128"):
        _plan(_tokenized(tmp_path / "tokenized", rows), tmp_path / "root")


def test_seq_len_must_hold_whole_multiples():
    with pytest.raises(ValidationError, match="seq_len=100 is not a multiple of pad_multiple=16; try 96"):
        PlanBinsConfig(seq_len=100, max_patches=1, pad_multiple=16)
