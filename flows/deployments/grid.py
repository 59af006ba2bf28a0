"""The points of a grid of settings, which a command line or a request gives."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dataset_builders.errors import InputError, shown
from flows.pipeline.recipe import read_yaml

MAX_RUNS = 64


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse texts of the form `a.b=[1, 2]`, with the list in YAML.

    Raises:
        InputError: a text is not of that form, or a field is given twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        dotted, equals, values = text.partition("=")
        parsed = read_yaml(values, f"the list of --grid {shown(text)}") if equals else None
        if not dotted.strip() or not isinstance(parsed, list):
            raise InputError(
                f"--grid {shown(text)} is not of the form a.b=[v1,v2], for example train.optim.lr=[1e-3,3e-3]"
            )
        if dotted.strip() in grid:
            raise InputError(f"--grid {dotted.strip()} appears twice; give all its values in one list")
        grid[dotted.strip()] = parsed
    return grid


def expand(grid: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Return every combination of the grid's values. The value of the last field changes fastest.

    Raises:
        InputError: the grid is empty, a field has no list of values, or there are more than MAX_RUNS combinations.
    """
    if not grid:
        raise InputError("the grid is empty; give a field and its values, for example train.optim.lr=[1e-3,3e-3]")
    total = 1
    for dotted, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"grid: {dotted}={shown(values)} is not a list of values to try, for example [1e-3, 3e-3]")
        total *= len(values)
    if total > MAX_RUNS:
        raise InputError(
            f"the grid has {total} combinations, more than {MAX_RUNS}; leave out values, or sweep in parts"
        )
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
