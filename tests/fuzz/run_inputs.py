"""A process of mutated inputs under the watch of watch.py: `python -m tests.fuzz.run_inputs KIND SEED COUNT DIRECTORY`.

A kind is `images`, `chat` (conversations through the checks of a sample and the encoder), `model` (see
mutated_models.py), a builder (rows and files of it), or one of the inputs with forbidden effects, which show that the
watch detects them.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from dataset_builders.contracts.sample import SKIP_REASONS, Message, Sample, SkipSample, from_fields, to_fields
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits, check_image, read_rgb
from dataset_builders.readers.parts import SkippedRow
from dataset_builders.sources.registry import get_builder
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import ModelDirectory
from tests.fuzz.hostile import SNIPPETS, long_text, spoilt, text
from tests.fuzz.mutated_models import model_inputs
from tests.fuzz.sources import IMAGES, KINDS
from tests.fuzz.watch import SECONDS, run
from tests.helpers.tiny_model import tiny_hf_dir

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


def image_inputs(rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    for i in range(count):
        yield image_outcome(spoilt(rng, IMAGES[i % len(IMAGES)]))


def chat_inputs(rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    # A model and the process of its template: made here, before the watch measures time.
    encoder = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    return (chat_outcome(rng, encoder, number) for number in range(count))


def chat_outcome(rng: random.Random, encoder: ChatEncoder, number: int) -> str:
    """Return the outcome of a hostile conversation. The first ones are very long."""
    long = ("x", " \u200b", "\U0001f600", "\u0301")
    texts = [rng.choice((text(rng), "seven", rng.choice(SNIPPETS))) for _ in range(rng.randrange(1, 6))]
    if number < len(long):
        texts = [long_text(long[number]), "seven"]
    roles = [
        rng.choice(("system", "user", "assistant")) if rng.random() < 0.1 else ("user", "assistant")[j % 2]
        for j in range(len(texts))
    ]
    messages = tuple(Message(role=role, text=words) for role, words in zip(roles, texts))
    slots = sum(words.count("<image>") for words in texts)
    images = (IMAGES[0],) * (slots if rng.random() < 0.9 else rng.randrange(3))
    try:
        Sample(key="s/00000000", messages=messages, images=images).check()
        ids, mask = encoder.encode(messages, np.full((len(images), 3), (1, 2, 2), np.int32))
    except SkipSample as skip:
        return skip.reason
    assert ids.shape == mask.shape and ids.min() >= 0 and ids.max() < encoder.vocab_size
    return "sample"


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


def naughty_inputs(kind: str, rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    if kind == "raises":
        raise KeyError("naughty")
    if kind == "hangs":
        time.sleep(5)
    yield str(len(b"x" * (300 << 20)))


INPUTS: dict[str, Callable[[random.Random, int, Path], Iterator[str]]] = {
    "images": image_inputs,
    "chat": chat_inputs,
    "model": model_inputs,
    **{kind: partial(naughty_inputs, kind) for kind in ("raises", "hangs", "grows")},
    **{kind: partial(row_inputs, kind) for kind in KINDS},
}


def main(kind: str, seed: str, count: str, directory: str) -> None:
    outcomes = INPUTS[kind](random.Random(f"{kind} {seed}"), int(count), Path(directory))
    run(outcomes, 1 if kind == "hangs" else SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
