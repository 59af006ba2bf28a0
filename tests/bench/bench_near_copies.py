"""How far apart copies are, and other pictures of their kind: python -m tests.bench.bench_near_copies [KIND ...]

For each kind, some pictures with all their changes, and pairs of other pictures whose hash and thumbnail make them
candidates (any pairs where there are none), are compared as the stage contamination compares them. One line a kind.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain, combinations, islice

import numpy as np
from PIL import Image

from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.picture_hash import PictureLook, look_at
from dataset_builders.sources.embedded import DigitCounts, iter_digit_rows
from stages.contamination.config import ContaminationConfig
from stages.contamination.copies import difference_limits, thumbnail_differences
from stages.contamination.second_look import apart
from tests.bench.command import table_head, table_row
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
    limit = difference_limits(min(one.width, one.height, other.width, other.height), LIMITS)
    return near and bool(thumbnail_differences(*pair)[0] <= limit)


def measure(kind: str) -> str:
    draw, seconds = KINDS[kind], []
    copied, largest = 0, 0.0
    unlike, apart_by = Counter[str](), dict[str, list[str]]()
    for seed in range(ORIGINALS):
        image = draw(seed)
        data = encoded(image)
        scans = [("a scan", encoded(scanned(image)))] if kind in ("forms", "pages of text", "receipts") else []
        for change, changed in chain(copies(image), hard_copies(image), scans):
            began = time.process_time()
            distance = apart(data, changed)
            seconds.append(time.process_time() - began)
            copied += 1
            if not is_candidate(look_at(data), look_at(changed)):
                unlike[change] += 1
            elif distance > LIMITS.max_apart:
                apart_by.setdefault(change, []).append(f"{distance:.2f}")
            else:
                largest = max(largest, distance)
    images = [encoded(draw(seed)) for seed in range(OTHERS)]
    looks = [look_at(data) for data in images]
    pairs = [(i, j) for i, j in combinations(range(OTHERS), 2) if looks[i].pixels_sha256 != looks[j].pixels_sha256]
    candidates = [(i, j) for i, j in pairs if is_candidate(looks[i], looks[j])]
    looked = (candidates or pairs)[:: max(1, len(candidates or pairs) // PAIRS)][:PAIRS]
    distances = [apart(images[i], images[j]) for i, j in looked]
    wrong = sum(distance <= LIMITS.max_apart for distance in distances) if candidates else 0
    found = copied - unlike.total() - sum(map(len, apart_by.values()))
    numbers = (f"{found} of {copied}", f"{largest:.2f}", len(pairs), len(candidates))
    others = (f"{wrong} of {len(looked)}", f"{min(distances):.2f}", f"{np.median(seconds):.2f} to {max(seconds):.2f}")
    far = "; ".join(f"{change} ({', '.join(distances)})" for change, distances in apart_by.items())
    no_candidates = "; ".join(f"{change} ({count})" for change, count in unlike.items())
    return table_row([kind, *numbers, *others, no_candidates, far])


def main(kinds: list[str]) -> None:
    columns = ["kind", "copies found", "apart, at most", "other pairs", "candidates", "called copies"]
    columns += ["apart, at least", "seconds of a look", "copies that are no candidates", "candidates too far apart"]
    print(table_head(columns))
    for kind in kinds or KINDS:
        print(measure(kind), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
