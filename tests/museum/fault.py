"""The check of an exhibit: it must fail when the published fault is put in."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.testing

_CHECKS = (Path(__file__).parent, Path(torch.testing.__file__).parent)


@contextlib.contextmanager
def fault_seen() -> Iterator[None]:
    """Pass if the check in the block fails on the published fault. Fail if it passes, or if an assertion of other code
    stops it."""
    with pytest.raises(AssertionError) as caught:
        yield
    place = Path(caught.traceback[-1].path)
    if not any(place.is_relative_to(folder) for folder in _CHECKS):
        pytest.fail(f"not the check, but {place} failed: {caught.value}")
