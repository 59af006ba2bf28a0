"""Seeded samples of every kind, and a samples artifact made from them without running convert."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, to_fields
from dataset_builders.contracts.shard_io import ShardWriter, remove_entries
from stages.shared.artifacts.artifact import Artifact
from tests.helpers.drawn_pictures import encoded


def make_image(width: int, height: int, seed: int = 0, mode: str = "RGB", image_format: str = "PNG") -> bytes:
    """Return an encoded image of smooth shapes with some noise, so that errors of scaling show."""
    rng = np.random.default_rng((seed, width, height))
    coarse = rng.integers(0, 256, (max(height // 24, 2), max(width // 24, 2), 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.integers(-24, 25, smooth.shape)
    image = Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))
    if mode in ("RGBA", "LA"):
        alpha = Image.fromarray(rng.integers(0, 256, (height, width), np.uint8))
        image.putalpha(alpha)
    return encoded(image.convert(mode), image_format, **({"quality": 90} if image_format == "JPEG" else {}))


def turns(*texts: str) -> tuple[Message, ...]:
    """Return user and assistant messages in rotation."""
    return tuple(Message(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts))


def make_sample(number: int) -> Sample:
    """Return the `number`-th sample, in rotation with one image, several questions, two images, or only text."""
    rng = np.random.default_rng(number)
    width, height = (int(n) for n in rng.integers(33, 160, 2))
    images = tuple(make_image(width + 7 * i, height, seed=number + i) for i in range((1, 1, 2, 0)[number % 4]))
    digit, other = (str(n) for n in rng.integers(0, 10, 2))
    messages = (
        turns(f"{IMAGE_SLOT}Which digit is in the picture?", digit),
        turns(f"{IMAGE_SLOT}Which digit is in the picture?", digit, "How many strokes does it have?", other),
        turns(f"{IMAGE_SLOT}{IMAGE_SLOT}Which of the two is larger?", "The left one is larger."),
        turns(f"What is {digit} plus {other}?", str(int(digit) + int(other))),
    )[number % 4]
    subset = ("single", "multi", "compare", "text")[number % 4]
    return Sample(key=f"{subset}/{number:08d}", messages=messages, images=images)


def make_samples_artifact(
    directory: Path, shards: dict[str, Sequence[Sample]], fingerprint: str | None = None
) -> Artifact:
    """Return a finished artifact of the convert stage, as if the_cauldron's builder had read it.

    Args:
        shards: name, for example `train/shard-00000.tar` -> its samples; train before heldout.
        fingerprint: None takes one of the samples.
    """
    entries = []
    for name, samples in shards.items():
        with ShardWriter(directory, name) as writer:
            for sample in samples:
                writer.write(sample.key, to_fields(sample))
            entries.append(writer.commit("train" if name.startswith("train/") else "heldout"))
    fingerprint = fingerprint or "".join(entry.sha256[:4] for entry in entries)[:16].ljust(16, "0")
    subsets = sorted({sample.subset for samples in shards.values() for sample in samples})
    stats = {"origins": {subset: {"builder": "the_cauldron", "name": subset} for subset in subsets}}
    about = {"fingerprint": fingerprint, "shards": entries, "stats": stats}
    Manifest(stage="convert", version=1, config={}, parents={}, **about).write(directory)
    remove_entries(directory, list(shards))
    return Artifact.load(directory)
