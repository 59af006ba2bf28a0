"""A candidate reading of a source: a builder, its options and subsets, and why it may fit."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A builder with options that may fit a source."""

    builder: str  # a name in sources/registry.py
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from their defaults
    subsets: tuple[str, ...] = ()  # names of the subsets to read; none means all
    # Globs of the files whose rows are held out; none if the names of the files do not decide it; None if nobody has
    # looked at the names.
    heldout_files: tuple[str, ...] | None = ()
    why: str  # the evidence in the source, in words for the user
    unused: tuple[str, ...] = ()  # columns without a role
    tier: int = 0  # 0: files of rows; 1: tars; 2: images with text files; 3: only images. A lower tier is preferred.
