"""The perceptual hash: its definition, and the distances of copies and of different images."""

import numpy as np
import pytest
from PIL import Image

from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.picture_hash import THUMBNAIL_SIDE, look_at, phash
from dataset_builders.sources.embedded import DigitCounts, iter_digit_rows
from stages.contamination.copies import thumbnail_differences
from stages.contamination.second_look import apart
from stages.contamination.stage import ContaminationConfig
from tests.helpers.drawn_pictures import chart, copies, encoded, receipt
from tests.helpers.tiers import full

pytestmark = pytest.mark.promise(
    "Held-out images that occur in train, encoded again, resized or cropped by 2% too, count in no score; others that "
    "look alike do; turned or mirrored copies are not looked for."
)

LIMITS = ContaminationConfig()


def slow_phash(thumbnail: np.ndarray) -> int:
    """Compute the hash by its definition: DCT-II sums in float64."""
    n, place = THUMBNAIL_SIDE, np.arange(THUMBNAIL_SIDE)
    low = np.zeros((8, 8))
    for u in range(8):
        for v in range(8):
            wave = np.outer(
                np.cos(np.pi * u * (2 * place + 1) / (2 * n)), np.cos(np.pi * v * (2 * place + 1) / (2 * n))
            )
            low[u, v] = (thumbnail * wave).sum()
    return int("".join("1" if value > np.median(low) else "0" for value in low.ravel()), 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_hash_is_the_signs_of_the_lowest_frequencies(seed):
    thumbnail = np.random.default_rng(seed).integers(0, 256, (THUMBNAIL_SIDE, THUMBNAIL_SIDE), np.uint8)
    assert phash(thumbnail) == slow_phash(thumbnail)


@pytest.mark.parametrize(("grey", "wanted"), [(0, 0), (128, 1 << 63), (255, 1 << 63)])
def test_a_picture_of_one_grey_has_its_mean_alone(grey, wanted):
    assert phash(np.full((THUMBNAIL_SIDE, THUMBNAIL_SIDE), grey, np.uint8)) == wanted


def test_pixels_are_told_apart_from_files():
    picture = chart(1)
    png, other_png, bmp = encoded(picture), encoded(picture, compress_level=1), encoded(picture, "BMP")
    assert len({png, other_png, bmp}) == 3
    assert look_at(png) == look_at(other_png) == look_at(bmp)
    wide, high = (encoded(Image.new("RGB", size, "white")) for size in ((64, 32), (32, 64)))
    assert look_at(wide).pixels_sha256 != look_at(high).pixels_sha256  # the same bytes in another shape
    changed = picture.copy()
    changed.putpixel((3, 3), (254, 255, 255))
    assert look_at(encoded(changed)).pixels_sha256 != look_at(png).pixels_sha256
    assert (look_at(png).width, look_at(png).height, len(look_at(png).thumbnail)) == (480, 320, 1024)


def distances(one: bytes, other: bytes) -> tuple[int, float]:
    a, b = look_at(one), look_at(other)
    left, right = (np.frombuffer(look.thumbnail, np.uint8)[None] for look in (a, b))
    return (a.phash ^ b.phash).bit_count(), float(thumbnail_differences(left, right)[0])


def digits(count: int) -> list[Image.Image]:
    rows = iter_digit_rows(0, DigitCounts(scans=count, multi=0, pairs=0, texts=0))
    return [open_rgb(row["images"][0]["bytes"]) for _, row in rows]


def drawn(kind: str, count: int) -> list[Image.Image]:
    if kind == "digits":
        return digits(count)
    return [{"charts": chart, "receipts": receipt}[kind](seed) for seed in range(count)]


@pytest.mark.parametrize("kind", ["charts", full("receipts"), "digits"])
def test_copies_are_within_the_limits(kind):
    """The images' shorter side is at least 64 pixels, so that half of it is as wide as a thumbnail."""
    for picture in [p for p in drawn(kind, 20) if min(p.size) >= 64][:6]:
        for name, data in copies(picture):
            bits, difference = distances(encoded(picture), data)
            assert bits <= LIMITS.max_bits and difference <= LIMITS.max_difference, (name, bits, difference)


@pytest.mark.parametrize("kind", ["charts", full("receipts"), "digits"])
def test_different_pictures_are_not(kind):
    """The hash by itself would call many of them equal; the thumbnail or the second look does not."""
    images = [encoded(picture) for picture in drawn(kind, 90)]
    hashes = np.array([look_at(data).phash for data in images], np.uint64)
    near = np.argwhere(np.triu(np.bitwise_count(hashes[:, None] ^ hashes) <= LIMITS.max_bits, 1))[:20]
    found = [(distances(images[i], images[j])[1], apart(images[i], images[j])) for i, j in near]
    called = [pair for pair in found if pair[0] <= LIMITS.max_difference and pair[1] <= LIMITS.max_apart]
    assert len(near) > 0 and called == []
