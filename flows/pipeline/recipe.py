"""Recipes: reads a YAML file, applies overrides and the points of a grid, and checks the result. An error is one line:
the field, its value, its bounds or the nearest known field.
"""

import difflib
import itertools
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dataset_builders.contracts.manifest import flatten
from dataset_builders.errors import InputError, one_line, plain_message, shown, without_middle
from dataset_builders.storage.store import home_expanded
from flows.pipeline.config import EASY_VQA, EMBEDDED, MOVES, SHAPES, SOURCE, SOURCES, PipelineConfig

RECIPES = Path(__file__).parents[1] / "recipes"

DEFAULT_RECIPE = "embedded"
# Settings that a recipe replaces as a whole instead of merging them with those of its base.
_WHOLE = ("data", "model", "options")
# Settings of which one is given: a change of one takes the other out of the recipe.
_ALTERNATIVES = {"train": ("num_steps", "num_epochs"), "train.optim": ("warmup_steps", "warmup_fraction")}
MAX_RUNS = 64  # largest number of points of a grid


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked configuration and its origin.

    Attributes:
        name: name of the recipe, for people.
        config: the checked configuration.
        differs: dotted fields of the identity that the overrides changed, with their new values.
    """

    name: str
    config: PipelineConfig
    differs: dict[str, object]


def known_recipes() -> list[str]:
    """Return the names of the recipes that are part of athanor, for `load_recipe`."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(
    name_or_path: str = DEFAULT_RECIPE, overrides: Sequence[str] = (), changes: Mapping[str, object] | None = None
) -> Recipe:
    """Read a recipe, apply its overrides, and check the result as a whole.

    Args:
        overrides: texts `a.b=value` of a command line, with the value in YAML.
        changes: dotted field -> value, from a request or a grid; applied after the overrides.

    Raises:
        InputError: there is no such recipe, it is not YAML, a key is unknown (the message names the nearest one), or a
            value is out of bounds.
    """
    path = _find(name_or_path)
    raw = _with_base(path)
    base = _validate(raw, f"recipe {path.stem}") if overrides or changes else None
    placed = [apply_override(raw, override) for override in overrides]
    for dotted, value in (changes or {}).items():
        _place(raw, dotted, value, f"{dotted}={shown(value)}")
    _replace_alternatives(raw, {*placed, *(changes or ())})
    what = f"recipe {path.stem}" + (" with --set" if overrides else " with settings" if changes else "")
    config = _validate(raw, what)
    before = flatten(base.identity()) if base else {}
    after = flatten(config.identity())
    differs = {key: after.get(key) for key in after if base and before.get(key) != after[key]}
    return Recipe(path.stem, config, differs)


def _find(name_or_path: str) -> Path:
    path = RECIPES / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    path = home_expanded(name_or_path)
    if path.is_file():
        return path
    raise InputError(
        f"there is no recipe {name_or_path!r}; give {', '.join(known_recipes())} or the path of a YAML file"
    )


def _with_base(path: Path, below: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings of a recipe, merged over the settings of the recipe that its key `base` names, if any.

    Args:
        below: names of the bases that led to this recipe.

    Raises:
        InputError: see `_read`; or recipes are each other's base.
    """
    raw = _read(path)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise InputError(f"{path}: base={shown(base)} is not the name or path of a recipe")
    if base in below:
        raise InputError(f"{path}: base={base} is a recipe that has this one as its base; remove one of them")
    return _merged(_with_base(_find(base), (*below, base)), raw)


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings of settings. `data`, `model` and a builder's options are replaced as a whole."""
    merged = dict(base)
    for key, value in over.items():
        is_section = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in _WHOLE
        merged[key] = _merged(base[key], value) if is_section else value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text in UTF-8: {one_line(error)}") from error
    raw = read_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds no mapping of settings; start from {RECIPES / (DEFAULT_RECIPE + '.yaml')}")
    return raw


def read_yaml(text: str, what: str) -> Any:
    """Return the value of a YAML text, without YAML 1.1's numbers to other bases: `1:30` and `010` are texts.

    Args:
        what: the file or option that holds the text, for the error message.

    Raises:
        InputError: the text is not YAML, has a key twice, or is nested too deeply.
    """
    try:
        return _Loader(text).get_single_data()
    except RecursionError as error:
        raise InputError(f"{what} is nested too deeply to be read") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number that Python refuses, as one of 5,000 digits
        mark = getattr(error, "problem_mark", None)
        why = f"{error.problem} in line {mark.line + 1}" if mark else one_line(error)
        raise InputError(f"{what} is not YAML: {why}; quote a value that is a text") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a repeated key is an error, and `1:30` and `010` are not 90 and 8."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} appears twice", key.start_mark)
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)

    def _construct_number(self, node: yaml.ScalarNode) -> Any:
        if ":" in node.value or re.fullmatch(r"[-+]?0\d+", node.value):
            return self.construct_scalar(node)
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)


for _number in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_number}", _Loader._construct_number)


def apply_override(raw: dict[str, Any], override: str) -> str:
    """Put the value of a `--set a.b=value` into nested settings, and return a.b.

    Raises:
        InputError: the text is not of that form, its value is not YAML, or a.b leads through a value without fields.
    """
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {shown(override)} is not of the form a.b=value, for example train.optim.lr=1e-3")
    value = read_yaml(text, f"the value of --set {shown(override)}") if text else ""
    _place(raw, path.strip(), value, f"--set {shown(override)}")
    return path.strip()


def _place(raw: dict[str, Any], dotted: str, value: object, what: str) -> None:
    *parents, last = dotted.split(".")
    place = raw
    for i, key in enumerate(parents):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise InputError(f"{what}: {'.'.join(parents[: i + 1])} is {shown(place)}, which has no fields")
    place[last] = value


def _replace_alternatives(raw: dict[str, Any], placed: Collection[str]) -> None:
    """Take the recipe's own setting out where a change gave its alternative, and only that."""
    for section, pair in _ALTERNATIVES.items():
        place: Any = raw
        for key in section.split("."):
            place = place.get(key) if isinstance(place, dict) else None
        for given, other in (pair, pair[::-1]):
            is_alone = f"{section}.{given}" in placed and f"{section}.{other}" not in placed
            if is_alone and isinstance(place, dict) and place.get(given) is not None:
                place.pop(other, None)


def _validate(raw: dict[str, Any], what: str) -> PipelineConfig:
    try:
        config = PipelineConfig.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{what}: {explain(error, PipelineConfig)}") from error
    _check_numbers(raw, config, what)
    return config


def _check_numbers(value: Any, taken: Any, what: str, dotted: str = "") -> None:
    """Raise InputError for true or false in place of a number; pydantic reads them as 1 and 0."""
    if isinstance(value, bool) and not isinstance(taken, bool):
        raise InputError(f"{what}: {dotted}={str(value).lower()} should be a number")
    if isinstance(value, list) and isinstance(taken, list | tuple):
        for number, (item, taken_item) in enumerate(zip(value, taken)):
            _check_numbers(item, taken_item, what, f"{dotted}.{number}")
    if isinstance(value, dict):
        fields = taken if isinstance(taken, dict) else dict(taken) if isinstance(taken, BaseModel) else {}
        for name, item in value.items():
            _check_numbers(item, fields.get(name, item), what, f"{dotted}.{name}" if dotted else str(name))


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


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first error of a validation in one line: the dotted field, the value, the bound or the nearest key."""
    details = error.errors(include_url=False)
    # An unknown key is the likely cause of a missing one, so it comes first.
    first = min(details, key=lambda d: d["type"] != "extra_forbidden")
    # The location holds the tag of a union's member, either second, as in ("data", "embedded", "seed"), or in brackets.
    tags = (EMBEDDED, EASY_VQA, SHAPES, MOVES, SOURCE, SOURCES)
    untagged = [part for i, part in enumerate(first["loc"]) if i != 1 or part not in tags]
    path = [part for part in map(str, untagged) if not part.startswith("(")]
    dotted, more = without_middle(".".join(path), 200), f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {dotted}{_nearest(path, model)}{more}"
    if first["type"] == "missing":
        return f"{dotted} is missing{_description(path, model)}{more}"
    message = plain_message(first["type"], first["msg"])
    if not path or isinstance(first["input"], dict):
        return (f"{dotted}: " if dotted else "") + message + more
    return f"{dotted}={shown(first['input'])} {message}{_description(path, model)}{more}"


def _nearest(path: Sequence[str], model: type[BaseModel]) -> str:
    here = list(dict.fromkeys(name for holder in _models_at(model, path[:-1]) for name in holder.model_fields))
    if close := difflib.get_close_matches(path[-1], here, n=1, cutoff=0.6):
        return f"; did you mean {'.'.join([*path[:-1], close[0]])}?"
    owners: dict[str, dict[str, None]] = {}  # last name of a field -> the parts that have it, in order
    for owner, _, name in (dotted.rpartition(".") for dotted in _all_fields(model)):
        owners.setdefault(name, {})[f"`{owner}`" if owner else "the top of a recipe"] = None
    for name in difflib.get_close_matches(path[-1], owners, n=1, cutoff=0.8):
        places = " or ".join([*owners[name]][:3])
        return f"; `{name}` belongs to {places}" if name == path[-1] else f"; did you mean `{name}` of {places}?"
    return f"; known here: {', '.join(here)}"


def _models_at(model: type[BaseModel], path: Sequence[str]) -> list[type[BaseModel]]:
    models, keys = [model], (key for key in path if not key.isdigit())  # a digit is an index of a list
    for key in keys:
        annotations = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        models = [inner for annotation in annotations for inner in submodels(annotation)]
        if any(typing.get_origin(annotation) is dict for annotation in annotations):
            next(keys, None)  # skip a key that the user chose, such as the name of a subset
    return models


def _all_fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        for inner in submodels(field.annotation):
            names += _all_fields(inner, f"{prefix}{name}.")
    return names


def _description(path: Sequence[str], model: type[BaseModel]) -> str:
    holders = _models_at(model, path[:-1]) if path else []
    field = next((holder.model_fields[path[-1]] for holder in holders if path[-1] in holder.model_fields), None)
    return f" [{field.description}]" if field is not None and field.description else ""


def submodels(annotation: object) -> list[type[BaseModel]]:
    """Return the pydantic models of an annotation; all of them for a union."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in submodels(part)]
