"""The two tiers of the suite: the core, which `make test` runs, and everything, which `make test-full` runs.

A test without a mark belongs to the core. `pytest.mark.full` moves a test out of it.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], core: Collection[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`: those in `core` run in every tier, the others only in the full one.

    Args:
        values: one value for each test, or a tuple of values where the test has several parameters.
        core: some of `values`.

    Raises:
        ValueError: `core` names a value that is not among `values`.
    """
    values = list(values)
    unknown = [value for value in core if value not in values]
    if unknown:
        raise ValueError(f"the core names {unknown}, which are not among the values")
    return [value if value in core else full(*(value if isinstance(value, tuple) else (value,))) for value in values]


def full(*values: Any, id: str | None = None) -> Any:
    """The values of one parameter set, which runs only in the full tier."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)
