"""A candidate reading of a source: a builder, its options and subsets, and why it may fit."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A builder with options that may fit a source.

    Attributes:
        builder: a name in sources/registry.py.
        options: the builder's options that differ from their defaults.
        subsets: names of the subsets to read; none means all.
        heldout_files: globs of the files whose rows are held out; none if the names of the files do not decide it; None
            if nobody has looked at the names.
        why: the evidence in the source, in words for the user.
        unused: columns without a role.
        tier: 0: files of rows; 1: tars; 2: images with text files; 3: only images. A lower tier is preferred.
    """

    builder: str
    options: dict[str, Any] = field(default_factory=dict)
    subsets: tuple[str, ...] = ()
    heldout_files: tuple[str, ...] | None = ()
    why: str
    unused: tuple[str, ...] = ()
    tier: int = 0
