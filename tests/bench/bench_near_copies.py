"""How far apart copies are, and other pictures of their kind: python -m tests.bench.bench_near_copies [KIND ...]

For each kind, some pictures with all their changes, and all pairs of other pictures whose hash and thumbnail make them
candidates, are compared as the stage contamination compares them. One line a change, and one a kind for the others.
"""

import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, combinations, islice

import numpy as np
from PIL import Image

from dataset_builders.embedded.digits import DigitCounts, iter_digit_rows
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.picture_hash import PictureLook, look_at
from stages.contamination.config import ContaminationConfig
from stages.contamination.copies import thumbnail_differences
from stages.contamination.second_look import apart
from tests.helpers.drawn_pictures import (
    chart,
    copies,
    encoded,
    form,
    hard_copies,
    page,
    photo,
    receipt,
    scanned,
    screenshot,
    xray,
)

ORIGINALS, OTHERS, PAIRS = 2, 24, 10
LIMITS = ContaminationConfig()


def digit(seed: int) -> Image.Image:
    rows = iter_digit_rows(0, DigitCounts(scans=seed + 1, multi=0, pairs=0, texts=0))
    return open_rgb(next(islice(rows, seed, None))[1]["images"][0]["bytes"])


def tiny(seed: int) -> Image.Image:
    """Draw a grey square of 4 x 4 pixels on 8 x 8, with one other pixel."""
    pixels = np.zeros((8, 8), np.uint8)
    pixels[2:6, 2:6] = 200
    pixels[divmod(seed % 64, 8)] = 255
    return Image.fromarray(pixels).convert("RGB")


def shape(seed: int) -> Image.Image:
    """Draw a square or a disc in one of eight colours, at one place."""
    image = np.full((64, 64, 3), 255, np.uint8)
    y, x = np.mgrid[0:64, 0:64]
    inside = (np.hypot(x - 32, y - 32) < 20) if seed % 2 else (np.maximum(abs(x - 32), abs(y - 32)) < 18)
    colours = ("red", "green", "blue", "teal", "brown", "gray", "#ff8800", "#4b4b4b")
    image[inside] = np.asarray(Image.new("RGB", (1, 1), colours[seed // 2 % 8]))[0, 0]
    return Image.fromarray(image)


KINDS: dict[str, Callable[[int], Image.Image]] = {
    "forms": lambda seed: form(seed, 800),
    "forms, one field differs": lambda seed: form(seed, 800, typed=5),
    "small forms": lambda seed: form(seed, 275),
    "screenshots": screenshot,
    "charts": chart,
    "receipts": receipt,
    "pages of text": page,
    "x-rays": lambda seed: xray(seed, 6),
    "faint x-rays": xray,
    "photos": photo,
    "shapes of 64 pixels": shape,
    "digits": digit,
    "8 x 8 pixels": tiny,
}


def is_candidate(one: PictureLook, other: PictureLook) -> bool:
    pair = [np.frombuffer(look.thumbnail, np.uint8)[None] for look in (one, other)]
    near = (one.phash ^ other.phash).bit_count() <= LIMITS.max_bits
    return near and float(thumbnail_differences(*pair)[0]) <= LIMITS.max_difference


def measure(kind: str) -> Iterator[str]:
    """Yield the lines of the table of one kind."""
    draw = KINDS[kind]
    found: dict[str, list[tuple[bool, float]]] = {}
    seconds: list[float] = []
    for seed in range(ORIGINALS):
        image = draw(seed)
        data = encoded(image)
        scans = [("a scan", encoded(scanned(image)))] if kind in ("forms", "pages of text", "receipts") else []
        for change, copied in chain(copies(image), hard_copies(image), scans):
            began = time.process_time()
            distance = apart(data, copied)
            seconds.append(time.process_time() - began)
            found.setdefault(change, []).append((is_candidate(look_at(data), look_at(copied)), distance))
    for change, rows in found.items():
        called = sum(candidate and distance <= LIMITS.max_apart for candidate, distance in rows)
        candidates, largest = sum(candidate for candidate, _ in rows), max(distance for _, distance in rows)
        yield f"| {kind} | {change} | {len(rows)} | {candidates} | {largest:.2f} | {called} |"
    images = [encoded(draw(seed)) for seed in range(OTHERS)]
    looks = [look_at(data) for data in images]
    pairs = [(i, j) for i, j in combinations(range(OTHERS), 2) if looks[i].pixels_sha256 != looks[j].pixels_sha256]
    candidates = [(i, j) for i, j in pairs if is_candidate(looks[i], looks[j])]
    looked = (candidates or pairs)[:: max(1, len(candidates or pairs) // PAIRS)][:PAIRS]
    distances = [apart(images[i], images[j]) for i, j in looked]
    called = sum(distance <= LIMITS.max_apart for distance in distances) if candidates else 0
    yield (
        f"| {kind} | **other pictures**, {len(looked)} looked at | {len(pairs)} | {len(candidates)} | "
        f"from {min(distances):.2f} | {called} |"
    )
    yield f"| {kind} | processor seconds of a look | | | {np.median(seconds):.2f}, at most {max(seconds):.2f} | |"


def main(kinds: list[str]) -> None:
    print("| kind | change | pairs | candidates | apart | called copies |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for kind in kinds or KINDS:
        for line in measure(kind):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
