"""Mutated images, and mutated rows and files of every builder; see watch.py."""

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dataset_builders.contracts.sample import SKIP_REASONS, Sample, SkipSample, from_fields, to_fields
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits, check_image, read_rgb
from dataset_builders.readers.parts import SkippedRow
from dataset_builders.sources.registry import get_builder
from tests.fuzz.hostile import spoilt
from tests.fuzz.sources import IMAGES, KINDS
from tests.fuzz.watch import run

BATCH = 100  # rows per file
SPOILT_FILES = 10  # damaged copies of each file
LIMITS = ImageLimits(max_pixels=4_000_000, min_side=8)


def image_outcome(data: bytes) -> str:
    try:
        info = check_image(data, LIMITS)
        pixels = read_rgb(data)
    except SkipSample as skip:
        return skip.reason
    assert pixels.shape == (info.height, info.width, 3) and pixels.dtype == np.uint8
    return "sample"


def row_outcome(item: Sample | SkippedRow) -> str:
    """Return the outcome of a builder's row, with its images decoded and its record written."""
    if isinstance(item, SkippedRow):
        assert item.reason in SKIP_REASONS
        json.dumps([item.key, item.detail], ensure_ascii=False).encode()
        return item.reason
    fields = to_fields(item)
    assert from_fields(item.key, fields) == item and len(item.digest()) == 64
    return next((outcome for data in item.images if (outcome := image_outcome(data)) != "sample"), "sample")


def image_inputs(rng: random.Random, count: int) -> Iterator[str]:
    for i in range(count):
        yield image_outcome(spoilt(rng, IMAGES[i % len(IMAGES)]))


def rows_of(kind: str, source: Path) -> Iterator[Sample | SkippedRow]:
    builder = get_builder(kind)
    options = builder.options.model_validate(KINDS[kind].options)
    for part in builder.list_parts(source, (), options):
        yield from builder.iter_part(part, options, None)


def row_inputs(kind: str, rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    """Yield files of mutated rows, each followed by damaged copies of one of its files."""
    while count > 0:
        source = directory / f"{kind}-{count}"
        size = min(BATCH, count)
        KINDS[kind].write(rng, size, source)
        seen = 0
        for item in rows_of(kind, source):
            seen += 1
            yield row_outcome(item)
        assert seen == size, f"{seen} rows came of {size} in {source}"
        count -= size
        for _ in range(min(SPOILT_FILES, count)):
            yield spoilt_file(kind, rng, source)
            count -= 1
        shutil.rmtree(source)


def spoilt_file(kind: str, rng: random.Random, source: Path) -> str:
    """Read a source of one small damaged file. It gives rows, or one InputError that names the file."""
    small = source.with_name("spoilt")
    KINDS[kind].write(rng, 5, small)
    file = small / KINDS[kind].file
    file.write_bytes(spoilt(rng, file.read_bytes()))
    try:
        outcomes = {row_outcome(item) for item in rows_of(kind, small)}
        return "file: rows" if outcomes else "file: no row"
    except InputError as error:
        assert str(file) in str(error) and "\n" not in str(error), error
        return "file: InputError"
    finally:
        shutil.rmtree(small)


def inputs_of(kind: str, rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    return image_inputs(rng, count) if kind == "images" else row_inputs(kind, rng, count, directory)


if __name__ == "__main__":
    run(inputs_of, *sys.argv[1:])
