"""Files whose names say that their rows are held out."""

import glob
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

TRAIN, HELDOUT = ("train", "training"), ("validation", "valid", "val", "test", "testing", "dev", "eval")

# Words of folders that are named neither after a class nor after what their images show.
NO_CLASSES = frozenset({*TRAIN, *HELDOUT, "images", "image", "imgs", "img", "pictures", "photos", "data", "set"})


def words_of(name: str) -> set[str]:
    """Return the words of a name, in lower case."""
    return set(re.split("[^a-z]+", name.lower())) - {""}


def split_of(name: str) -> str | None:
    """Return `train` or `heldout` for a name of a split, such as train, Test or test_images2017; None for others."""
    words = words_of(name)
    if not words <= NO_CLASSES or words.isdisjoint({*TRAIN, *HELDOUT}):
        return None
    return "heldout" if words.isdisjoint(TRAIN) else "train"


def heldout_globs(names: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the files that are named like a held-out split; none if all files are, or none is.

    A running number is `*` in a glob: data/test-*-of-*.parquet.
    """
    is_held = {name: _is_held(name) for name in names}
    if len(set(is_held.values())) < 2:
        return ()
    escaped = {glob.escape(name): re.sub(r"\d+", "*", glob.escape(name)) for name in names if is_held[name]}
    is_wide = any(fnmatchcase(name, pattern) for name in names if not is_held[name] for pattern in escaped.values())
    return tuple(dict.fromkeys(escaped if is_wide else escaped.values()))


def _is_held(name: str) -> bool:
    words = words_of(name.rpartition(".")[0])
    return not words.isdisjoint(HELDOUT) and words.isdisjoint(TRAIN)
