"""pack: every sample in one bin, no bin over its limit in any dimension, nearly full, kinds mixed, deterministic."""

import hashlib

import numpy as np
import pytest

from stages.plan_bins.pack import pack

pytestmark = pytest.mark.promise(
    "Bins keep their limits, any step's are found without holding an epoch, and dealing them to ranks by cost, "
    "threads and resumes change none of a step's samples."
)


def lengths(kind: str, num: int, seq_len: int, pad_multiple: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, patches) of `num` samples.

    log-normal: tokens with mean 900 and sigma 0.9, cut at seq_len; a random part of them are image tokens in four
    of five samples. Other kinds: log-normal text (median 120) and images as the name says.
    """
    rng = np.random.default_rng(seed)
    if kind == "log-normal":
        tokens = np.exp(rng.normal(np.log(900) - 0.9**2 / 2, 0.9, num)).astype(np.int64).clip(1, seq_len)
        images = (tokens * rng.uniform(0, 1, num)).astype(np.int64) * (rng.random(num) < 0.8)
        return (-(-tokens // pad_multiple) * pad_multiple).clip(max=seq_len), 4 * images
    text = np.exp(rng.normal(np.log(120), 0.9, num)).astype(np.int64) + 16
    per_image = np.exp(rng.normal(np.log(480), 0.6, num)).astype(np.int64)
    images = {"text": 0, "one image": 1, "mixed": rng.integers(0, 4, num)}[kind] * per_image
    room = seq_len - text.clip(max=seq_len // 2)
    images = np.minimum(images, room)
    tokens = text.clip(max=seq_len // 2) + images
    return -(-tokens // pad_multiple) * pad_multiple, 4 * images


def _check(bins: np.ndarray, tokens: np.ndarray, patches: np.ndarray, seq_len: int, max_patches: int) -> int:
    count = int(bins.max()) + 1
    assert len(bins) == len(tokens) and np.array_equal(np.unique(bins), np.arange(count))
    assert np.bincount(bins, tokens).max() <= seq_len and np.bincount(bins, patches).max() <= max_patches
    return count


def _first_fit(tokens: np.ndarray, patches: np.ndarray, seq_len: int, max_patches: int) -> int:
    """Return the number of bins of the textbook method: longest first, each into the first bin that has room."""
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


def test_log_normal_lengths_leave_two_in_a_thousand():
    tokens, patches = lengths("log-normal", 50_000, 8192, 1, seed=3)
    count = _check(pack(tokens, patches, 8192, 32_768), tokens, patches, 8192, 32_768)
    assert tokens.sum() / (count * 8192) >= 0.998


@pytest.mark.parametrize(
    ("kind", "short", "max_images", "fill"),
    [
        *(("mixed", 1, 3, 0.92), ("mixed", 1, 40, 0.92)),
        ("mixed", 1, 8, 0.92),  # images of about 500 tokens: a bin is limited by tokens and by images
        *(("log-normal", 1, 40, 0.98), ("log-normal", 8, 12, 0.95)),
        *(("log-normal", 8, 40, 0.78), ("log-normal", 1, 8, 0.85)),
    ],
)
def test_a_cap_on_images_is_kept_and_bins_are_full_whatever_is_scarce(kind, short, max_images, fill):
    """Bins are limited by tokens, images, patches or nothing."""
    tokens, patches = lengths(kind, 20_000, 8192, 1, seed=5)
    tokens = tokens // short + 1 if short > 1 else tokens
    images = np.where(patches > 0, np.random.default_rng(0).integers(1, 4, len(tokens)), 0)
    bins = pack(tokens, patches, 8192, 32_768, images, max_images)
    count = _check(bins, tokens, patches, 8192, 32_768)
    assert np.bincount(bins, images).max() <= max_images
    fills = [tokens.sum() / 8192, patches.sum() / 32_768, images.sum() / max_images]
    assert max(fills) / count > fill


@pytest.mark.parametrize("seed", range(20))
def test_no_dimension_overflows_where_all_three_are_about_as_scarce(seed):
    rng = np.random.default_rng(seed)
    tokens, images = rng.integers(1, 20, 2000), rng.integers(0, 4, 2000)
    patches = images * rng.integers(1, 30, 2000)
    bins = pack(tokens, patches, 300, int(300 * patches.mean() / 10), images, int(300 * images.mean() / 9.5))
    _check(bins, tokens, patches, 300, int(300 * patches.mean() / 10))
    assert np.bincount(bins, images).max() <= int(300 * images.mean() / 9.5)


def test_samples_without_images_fill_bins_that_take_no_more_images():
    """One image per bin, and texts that fill the remainder: the number of bins equals the number of images."""
    tokens, patches = np.array([50] * 20 + [10] * 100), np.array([40] * 20 + [0] * 100)
    images = (patches > 0).astype(int)
    bins = pack(tokens, patches, 100, 1000, images, 1)
    assert _check(bins, tokens, patches, 100, 1000) == 20
    assert np.bincount(bins, images).max() == 1


def test_the_same_lengths_give_the_same_bins_on_every_machine():
    tokens, patches = lengths("mixed", 3000, 8192, 16, seed=4)
    found = pack(tokens, patches.clip(max=16_384), 8192, 16_384).astype("<i4").tobytes()
    assert hashlib.sha256(found).hexdigest()[:16] == "2200d8de0f4fbe46"


def test_equal_lengths_by_hand():
    assert sorted(pack(np.array([4, 4, 4, 4]), np.zeros(4, int), 8, 1).tolist()) == [0, 0, 1, 1]
    assert pack(np.array([3, 6, 8, 2, 5]), np.zeros(5, int), 8, 1).tolist() == [2, 1, 0, 1, 2]
    by_patches = pack(np.array([1, 1, 1]), np.array([4, 4, 4]), 100, 8)
    assert sorted(by_patches.tolist()) == [0, 0, 1], "patches fill up first"
    assert pack(np.zeros(0, int), np.zeros(0, int), 8, 8).tolist() == []


def test_bins_mix_kinds_of_samples_whose_lengths_differ():
    """Short texts and longer images: if sorted by length only, most bins would hold one kind."""
    rng = np.random.default_rng(0)
    is_text = rng.random(5000) < 0.5
    tokens = np.where(is_text, rng.integers(20, 40, 5000), rng.integers(70, 120, 5000))
    patches = np.where(is_text, 0, 4 * 60)
    bins = pack(tokens, patches, 2048, 8192)
    count = _check(bins, tokens, patches, 2048, 8192)
    share = np.bincount(bins, is_text) / np.bincount(bins)
    assert ((share > 0.2) & (share < 0.8)).mean() > 0.95
    assert tokens.sum() / (count * 2048) > 0.99
