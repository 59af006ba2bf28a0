"""The lines that `athanor init` prints: the source, three samples, and everything that looks wrong."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample
from dataset_builders.errors import printable
from dataset_builders.pictures.images import read_rgb
from dataset_builders.recognise.columns import CLASSIFY
from dataset_builders.recognise.layouts import unread
from dataset_builders.recognise.recognise import Recognised, Survey, Trial
from dataset_builders.storage.store import StorePath
from stages.convert.config import ConvertConfig
from stages.shared.artifacts.left_out import MIN_LOST

SHOWN = 3
_CHARS = 300  # longest text that is shown
_SIDE = 36  # columns of an image on the terminal
_FEW = 5  # largest number of names in a list


def summary(found: Recognised, trial: Trial) -> Iterator[str]:
    """Yield the lines that say what was recognised, and why."""
    reading = trial.reading
    options = ", ".join(f"{name}={value!r}" for name, value in reading.options.items())
    yield f"Recognised: builder {reading.builder}{f' with {options}' if options else ''}"
    yield f"  because {reading.why}"
    subsets = ", ".join(f"{name} ({rows:,})" for name, rows in trial.subsets.most_common(_FEW))
    more = f" and {len(trial.subsets) - _FEW} more" if len(trial.subsets) > _FEW else ""
    yield f"  {trial.rows:,} rows in {_counted(len(trial.subsets), 'subset')}: {subsets}{more}"
    if trial.heldout:
        yield f"  {trial.heldout:,} of these rows are held out by the names of their files, folders or splits"
    yield f"  {len(trial.samples):,} of the {trial.tried:,} rows that were read can be used"
    others = [other.reading for other in found.trials if other is not trial and other.samples]
    for other in others:
        yield f"  it could also be {other.builder}: {other.why}"


def sample_lines(sample: Sample, is_terminal: bool) -> Iterator[str]:
    """Yield the lines of a sample: its images, if the terminal has colours, and its texts, which are printable."""
    yield f"{sample.key}: {_counted(len(sample.images), 'image')}"
    if is_terminal:
        for data in sample.images[:2]:
            yield from _blocks(data)
    for message in sample.messages:
        text = printable(" ".join(message.text.replace(IMAGE_SLOT, "<image> ").split()))
        yield f"  {message.role}: {text if len(text) <= _CHARS else text[:_CHARS] + ' ...'}"


def anomalies(source: StorePath, found: Survey, trial: Trial, convert: ConvertConfig) -> Iterator[str]:
    """Yield one line for each thing that a user should check before a run."""
    limit = convert.max_skip_fraction
    for reason, number in trial.reasons.most_common():
        yield f"{number} of {trial.tried} rows are left out as {reason}; the first: {trial.details[reason]}"
    lost = trial.tried - len(trial.samples)
    if lost > limit * trial.tried and lost >= MIN_LOST:
        yield (
            f"{lost} of {trial.tried} rows cannot be used, and a run stops above convert.max_skip_fraction={limit}; "
            "mend the data, or raise the limit in the recipe"
        )
    if trial.duplicates:
        yield f"{trial.duplicates} of {len(trial.samples)} samples repeat one before them, and will be left out"
    if convert.min_heldout < ConvertConfig.model_fields["min_heldout"].default and not trial.splits:
        yield f"convert.min_heldout={convert.min_heldout}: scores of so few held-out samples say little; add rows"
    if trial.reading.unused:
        what = "columns" if trial.reading.builder == "table" else "fields"
        yield f"{what} that are not used: {', '.join(trial.reading.unused)}"
    yield from found.problems
    yield from unread(source, found.others)
    used = sum(len(sample.images) for sample in trial.samples)
    if found.images and not used:
        yield f"no row uses one of the {len(found.images):,} image files, for example {found.images[0]}"
    if found.others:
        names = ", ".join(found.others[:_FEW]) + (" ..." if len(found.others) > _FEW else "")
        yield f"files that are not read: {names}"
    answers = Counter(sample.messages[-1].text for sample in trial.samples)
    if str(trial.reading.options.get("question")).endswith(CLASSIFY) and all(text.isdigit() for text in answers):
        yield "the answers are the numbers of classes; write the names in their place, or the model learns numbers"
    text, times = answers.most_common(1)[0]
    if len(trial.samples) >= 10 and times > 0.9 * len(trial.samples):
        yield f"{times} of {len(trial.samples)} answers are {text[:60]!r}: there is little to learn"


def is_colourful() -> bool:
    """Whether output goes to a terminal that is wide enough for an image."""
    return sys.stdout.isatty() and shutil.get_terminal_size().columns >= 2 * _SIDE


def _blocks(data: bytes) -> Iterator[str]:
    """Yield an image as lines of half blocks in 24-bit colour (ECMA-48, SGR 38 and 48), two pixels per character."""
    pixels = read_rgb(data)
    scale = _SIDE / max(pixels.shape[:2])
    rows, columns = (max(2, round(side * scale)) for side in pixels.shape[:2])
    rows -= rows % 2
    small = pixels[np.arange(rows) * pixels.shape[0] // rows][:, np.arange(columns) * pixels.shape[1] // columns]
    for upper, lower in zip(small[::2], small[1::2]):
        yield "  " + "".join(f"{_colour(38, a)}{_colour(48, b)}\u2580" for a, b in zip(upper, lower)) + "\x1b[0m"


def _colour(ground: int, rgb: np.ndarray) -> str:
    return f"\x1b[{ground};2;{rgb[0]};{rgb[1]};{rgb[2]}m"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
