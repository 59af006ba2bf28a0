"""Files whose names say that their rows are held out."""

import glob
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

TRAIN = ("train", "training", "trainset")
HELDOUT = (
    *("validation", "valid", "val", "valset", "test", "testing", "testset", "testa", "testb", "dev", "devset", "eval"),
    *("evaluation", "holdout", "heldout", "held", "minival", "minitest", "submission"),
)
SPLIT_NAMES = ("split", "subset", "partition", "part", "set")  # of columns

# Words of folders that are named neither after a class nor after what their images show.
NO_CLASSES = frozenset(
    {*TRAIN, *HELDOUT, "images", "image", "imgs", "img", "pictures", "photos", "data", "set", "out", "seen", "unseen"}
)


def words_of(name: str) -> set[str]:
    """Return the words of a name in lower case, without single letters: testA and test_b have one word, test."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
    return {word.lower() for word in words if len(word) > 1}


def split_of(name: str) -> str | None:
    """Return `train` or `heldout` for a name of a split, such as train, Test or test_images2017; None for others."""
    words = words_of(name)
    if not words <= NO_CLASSES or words.isdisjoint({*TRAIN, *HELDOUT}):
        return None
    return "heldout" if words.isdisjoint(TRAIN) else "train"


def splits_of(names: Iterable[str]) -> dict[str, str]:
    """Return the folders among these names that are splits -> `train` or `heldout`.

    Where one is named after training and another after held-out data, other words beside do not matter: seg_train and
    seg_test. Else only names like train, Test or test_images2017 are splits.
    """
    names = list(dict.fromkeys(names))
    held = {name for name in names if is_held(name)}
    train = {name for name in names if not words_of(name).isdisjoint(TRAIN)}
    if held and train:
        return {name: "heldout" if name in held else "train" for name in names if name in held | train}
    return {name: split for name in names if (split := split_of(name)) is not None}


def heldout_globs(names: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the files that are named like a held-out split; none if all files are, or none is.

    A running number is `*` in a glob: data/test-*-of-*.parquet.
    """
    held = {name: is_held(name.rpartition(".")[0]) for name in names}
    if len(set(held.values())) < 2:
        return ()
    escaped = {glob.escape(name): re.sub(r"\d+", "*", glob.escape(name)) for name in names if held[name]}
    # With `*` for its numbers, a name may also match a file that is not held out: then the names themselves are given.
    is_wide = any(fnmatchcase(name, pattern) for name in names if not held[name] for pattern in escaped.values())
    return tuple(dict.fromkeys(escaped if is_wide else escaped.values()))


def is_held(name: str) -> bool:
    """Whether a name has a word of held-out data and none of training data."""
    words = words_of(name)
    return not words.isdisjoint(HELDOUT) and words.isdisjoint(TRAIN)
