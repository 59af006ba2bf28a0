"""Raw rows that installed packages hold, in the_cauldron's schema: real, small, offline.

scikit-learn bundles handwritten digits. 1,797 scans of 8 x 8 grey values become one PNG each, dark ink on white,
smoothly enlarged to 32 to 160 pixels. A third of them are placed in one half of a sheet that is twice as wide or as
high. A scan's bytes are the same in every row that shows it. There are four subsets, and a fifth that is empty unless
it is requested:

    digits_single   every scan once: one question, the answer is the digit            "Which digit is this?"  "7"
    digits_multi    some scans again, several questions each: a chat of several turns
    digits_compare  pairs of scans, each scan in at most one pair                     "Which is larger, ..."  "first"
    digits_text     no image                                                          "What is 3 plus 4?"     "7"
    digits_words    some scans again: a task that the other subsets do not teach      "Spell the digit."      "seven"

The package `easy-vqa` holds pictures of 64 x 64 pixels, each with one coloured shape, and questions about them with 13
different answers: 4,000 pictures with 38,575 questions to train on, and 1,000 with 9,673 questions to test on. A row is
one picture with all its questions, in the schema of the_cauldron:

    {"images": [{"bytes": b"\\x89PNG...", "path": None}],
     "texts": [{"user": "what is the blue shape?", "assistant": "rectangle", "source": "easy-vqa"},
               {"user": "is there a triangle in the image?", "assistant": "no", "source": "easy-vqa"}]}
"""

import importlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset_builders.errors import InputError
from dataset_builders.known_version import installed_version
from dataset_builders.pictures.images import enlarge_grey, pixels_png

NUM_SCANS = 1797
SUBSETS = ("digits_single", "digits_multi", "digits_compare", "digits_text", "digits_words")
SINGLE_QUESTIONS = (
    "Which digit is this?",
    "What digit is written here?",
    "Which number do you see?",
    "Read the digit.",
    "What is the digit in the picture?",
)
EVEN_QUESTION = "Is it even or odd?"
FIVE_QUESTION = "Is it larger than five?"
NEXT_QUESTION = "Which number comes after it?"
LARGER_QUESTION = "Which is larger, the first or the second?"
BOTH_QUESTION = "Which digits are these?"
WORD_QUESTION = "Spell the digit."
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

EASY_VQA_PACKAGE = "easy-vqa"
EASY_VQA_SPLITS = ("train", "test")  # as the package has them

_SIDES = (32, 40, 48, 56, 64, 80, 96, 128, 160)  # pixels
_SIDE_SHARES = (0.16, 0.12, 0.20, 0.12, 0.22, 0.08, 0.06, 0.03, 0.01)
_LONGER_SHARE = 1 / 3
_PAPER = 255

Row = dict[str, list[dict[str, object]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitCounts:
    """The maximal number of rows of each subset."""

    scans: int  # of digits_single; the other subsets choose from these scans
    multi: int
    pairs: int  # of digits_compare
    texts: int
    words: int = 0


def iter_digit_rows(seed: int, counts: DigitCounts) -> Iterator[tuple[str, Row]]:
    """Yield (subset, row) in order of the subsets; the rows are the same for the same seed and counts."""
    # Rows of 64 grey values, 0 to 16, and the digit. scikit-learn's load_digits would first import SciPy, which takes
    # seconds.
    bundled = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(bundled), delimiter=",")[: counts.scans]
    scans, labels = table[:, :-1].reshape(-1, 8, 8), [int(label) for label in table[:, -1]]
    rng = np.random.default_rng([seed, 0])
    images = [_scan_png(scan, rng) for scan in scans]
    of_single = _rng(seed, 1)
    for image, label in zip(images, labels):
        question = SINGLE_QUESTIONS[of_single.integers(len(SINGLE_QUESTIONS))]
        yield "digits_single", _row([image], [(question, str(label))])
    yield from (("digits_multi", row) for row in _multi_rows(images, labels, counts.multi, _rng(seed, 2)))
    yield from (("digits_compare", row) for row in _compare_rows(images, labels, counts.pairs, _rng(seed, 3)))
    yield from (("digits_text", row) for row in _text_rows(counts.texts, _rng(seed, 4)))
    for index in _rng(seed, 5).permutation(len(images))[: counts.words]:
        yield "digits_words", _row([images[index]], [(WORD_QUESTION, WORDS[labels[index]])])


def _rng(seed: int, stream: int) -> np.random.Generator:
    """Return a random stream for one subset, so that the size of one subset does not change the rows of another."""
    return np.random.default_rng([seed, stream])


def _scan_png(scan: np.ndarray, rng: np.random.Generator) -> bytes:
    """Convert (8, 8) floats from 0 to 16, where 16 is ink, to a grey PNG of a random size."""
    side = int(rng.choice(_SIDES, p=_SIDE_SHARES))
    ink = np.round(_PAPER - scan * (_PAPER / 16)).astype(np.uint8)
    picture = enlarge_grey(np.pad(ink, 1, constant_values=_PAPER), side, side)  # the scans touch their border
    if rng.random() < _LONGER_SHARE:
        # In one half of a sheet that is exactly twice as long along one axis. A half, and no arbitrary offset: the
        # default model trains on 1,500 scans in a minute, which is too few for arbitrary offsets (0.88 instead of 0.98
        # of the held-out digits are right).
        before = side * int(rng.integers(2))
        margins = [(0, 0), (0, 0)]
        margins[int(rng.integers(2))] = (before, side - before)
        picture = np.pad(picture, margins, constant_values=_PAPER)
    return pixels_png(picture)


def _row(images: list[bytes], pairs: list[tuple[str, str]]) -> Row:
    return {
        "images": [{"bytes": image, "path": None} for image in images],
        "texts": [{"user": question, "assistant": answer, "source": "digits"} for question, answer in pairs],
    }


def _multi_rows(images: list[bytes], labels: list[int], count: int, rng: np.random.Generator) -> Iterator[Row]:
    for index in rng.permutation(len(images))[:count]:
        label = labels[index]
        later = [
            (EVEN_QUESTION, "odd" if label % 2 else "even"),
            (FIVE_QUESTION, "yes" if label > 5 else "no"),
            (NEXT_QUESTION, str(label + 1)),
        ]
        chosen = rng.permutation(len(later))[: rng.integers(1, len(later) + 1)]
        first = (SINGLE_QUESTIONS[rng.integers(len(SINGLE_QUESTIONS))], str(label))
        yield _row([images[index]], [first, *(later[i] for i in chosen)])


def _compare_rows(images: list[bytes], labels: list[int], count: int, rng: np.random.Generator) -> Iterator[Row]:
    order = rng.permutation(len(images))
    pairs = [(a, b) for a, b in zip(order[::2], order[1::2]) if labels[a] != labels[b]]
    for a, b in pairs[:count]:
        both = (BOTH_QUESTION, f"{labels[a]} {labels[b]}")
        larger = (LARGER_QUESTION, "first" if labels[a] > labels[b] else "second")
        turns = [[larger], [both], [both, larger]][rng.integers(3)]
        yield _row([images[a], images[b]], turns)


def _text_rows(count: int, rng: np.random.Generator) -> Iterator[Row]:
    """Yield questions that all differ; an exact duplicate would be left out later anyway."""
    pairs = [(f"Which number comes after {n}?", str(n + 1)) for n in range(40)]
    pairs += [(f"Which number comes before {n}?", str(n - 1)) for n in range(1, 41)]
    pairs += [(f"Is {n} even or odd?", "odd" if n % 2 else "even") for n in range(40)]
    pairs += [(f"What is {a} plus {b}?", str(a + b)) for a in range(10) for b in range(10)]
    pairs += [(f"Which is larger, {a} or {b}?", str(max(a, b))) for a in range(10) for b in range(10) if a != b]
    for index in rng.permutation(len(pairs))[:count]:
        yield _row([], [pairs[index]])


def check_easy_vqa(version: str) -> None:
    """Check that the package easy-vqa is installed in this version."""
    found = installed_version(EASY_VQA_PACKAGE)
    if found != version:
        state = f"{found} is installed" if found else "it is not installed"
        raise InputError(
            f"data.kind=easy_vqa reads the package {EASY_VQA_PACKAGE} {version}, and {state}: "
            "pip install -e '.[easy-vqa]'"
        )


def iter_easy_vqa_rows(split: str) -> Iterator[Row]:
    """Yield the rows of a split in the order of the pictures' numbers; the questions of a picture keep their order."""
    package = importlib.import_module("easy_vqa")  # it is optional
    asked: dict[int, list[tuple[str, str]]] = {}
    for question, answer, number in zip(*getattr(package, f"get_{split}_questions")()):
        asked.setdefault(number, []).append((question, answer))
    paths = getattr(package, f"get_{split}_image_paths")()
    if sorted(paths) != sorted(asked) or sorted(paths) != list(range(len(paths))):
        raise InputError(
            f"the package {EASY_VQA_PACKAGE} in {Path(str(package.__file__)).parent} is incomplete: its {split} split "
            f"has {len(paths)} pictures, and questions about {len(asked)}; install it again"
        )
    for number in sorted(paths):
        texts = [
            {"user": question, "assistant": answer, "source": EASY_VQA_PACKAGE} for question, answer in asked[number]
        ]
        yield {"images": [{"bytes": Path(paths[number]).read_bytes(), "path": None}], "texts": texts}
