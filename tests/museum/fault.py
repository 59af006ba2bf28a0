"""The check of an exhibit: it must fail when the published fault is put in."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.testing

_CHECKS = (Path(__file__).parent, Path(torch.testing.__file__).parent)


@dataclass(frozen=True, slots=True)
class Fault:
    """A published fault of several that one check sees.

    Attributes:
        told: the fault in one sentence.
        reports: the addresses of its reports.
        put_in: returns what the check gets in a program with the fault.
    """

    told: str
    reports: str
    put_in: Callable[..., Any]


@contextlib.contextmanager
def fault_seen() -> Iterator[None]:
    """Pass if the check in the block fails on the published fault. Fail if it passes, or if an assertion of other code
    stops it."""
    with pytest.raises(AssertionError) as caught:
        yield
    place = Path(caught.traceback[-1].path)
    if not any(place.is_relative_to(folder) for folder in _CHECKS):
        pytest.fail(f"not the check, but {place} failed: {caught.value}")
