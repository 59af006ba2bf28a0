"""Recipes: load a YAML file, put the overrides in, and say in one line what is wrong with it."""

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.fingerprint import flatten
from flows.pipeline_config import DRAWN, EMBEDDED, SOURCE, PipelineConfig

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "embedded"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked configuration and where it comes from.

    Attributes:
        name: of the recipe, for people.
        differs: dotted fields of the identity that the overrides changed, with their new values.
    """

    name: str
    config: PipelineConfig
    differs: dict[str, object]


def known_recipes() -> list[str]:
    """Names that `load_recipe` takes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(
    name_or_path: str = DEFAULT_RECIPE, overrides: Sequence[str] = (), changes: Mapping[str, object] | None = None
) -> Recipe:
    """Read a recipe, put overrides in, and check the whole.

    Args:
        overrides: `a.b=value` of a command line, the value in YAML.
        changes: dotted field -> value, as a request or a grid gives them; after the overrides.

    Raises:
        InputError: no such recipe, no YAML, an unknown key (the nearest known one is named), a value out of bounds.
    """
    path = _find(name_or_path)
    raw = _read(path)
    base = _validate(raw, f"recipe {path.stem}") if overrides or changes else None
    for override in overrides:
        _set(raw, override)
    for dotted, value in (changes or {}).items():
        _place(raw, dotted, value, f"{dotted}={value!r}")
    what = f"recipe {path.stem}" + (" with --set" if overrides else " with overrides" if changes else "")
    config = _validate(raw, what)
    before = flatten(base.identity()) if base else {}
    after = flatten(config.identity())
    differs = {key: after.get(key) for key in after if base and before.get(key) != after[key]}
    return Recipe(path.stem, config, differs)


def _find(name_or_path: str) -> Path:
    path = RECIPES / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    raise InputError(f"no recipe {name_or_path!r}; known: {', '.join(known_recipes())}, or a path of a YAML file")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds no mapping of settings; start from {RECIPES / (DEFAULT_RECIPE + '.yaml')}")
    return raw


def _set(raw: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {override!r} is not of the form a.b=value, for example train.optim.lr=1e-3")
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise InputError(f"--set {override!r}: {text!r} is no YAML value; quote it") from error
    _place(raw, path.strip(), value, f"--set {override!r}")


def _place(raw: dict[str, Any], dotted: str, value: object, what: str) -> None:
    *parents, last = dotted.split(".")
    place = raw
    for i, key in enumerate(parents):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise InputError(f"{what}: {'.'.join(parents[: i + 1])} is {place!r} and has no fields")
    place[last] = value


def dotted_changes(overrides: Mapping[str, Any], null: str) -> dict[str, object]:
    """A request's nested overrides as dotted fields: {"train": {"optim": {"lr": 1e-3}}} -> {"train.optim.lr": 1e-3}.

    None means "as the recipe says" and is left out. A field that is a mapping of the user's own, as
    `plan_bins.mixture`, is one value. What no model knows stays, to be refused with its path.

    Args:
        null: the word for null in a field that may be null.
    """
    return _dotted(overrides, PipelineConfig, "", null)


def _dotted(overrides: Mapping[str, Any], model: type[BaseModel], prefix: str, null: str) -> dict[str, object]:
    changes: dict[str, object] = {}
    for name, value in overrides.items():
        if value is None:
            continue
        field = model.model_fields.get(name)
        annotation = field.annotation if field else None
        inner = None if typing.get_origin(annotation) is dict else _submodel(annotation)
        if inner is not None and isinstance(value, Mapping):
            changes |= _dotted(value, inner, f"{prefix}{name}.", null)
        else:
            is_null = value == null and type(None) in typing.get_args(annotation)
            changes[f"{prefix}{name}"] = None if is_null else value
    return changes


def _validate(raw: dict[str, Any], what: str) -> PipelineConfig:
    try:
        return PipelineConfig.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{what}: {explain(error, PipelineConfig)}") from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first error of a validation in one line: the dotted field, the value, the bound or the nearest key."""
    details = error.errors(include_url=False)
    # An unknown key is the likely cause of a missing one, so it comes first.
    first = min(details, key=lambda d: d["type"] != "extra_forbidden")
    # The tag of what a section is comes second: ("data", "drawn", "seed").
    path = [str(part) for i, part in enumerate(first["loc"]) if i != 1 or part not in (DRAWN, EMBEDDED, SOURCE)]
    dotted, more = ".".join(path), f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {dotted}{_nearest(path, model)}{more}"
    if first["type"] == "missing":
        return f"{dotted} is missing{_description(path, model)}{more}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    message = re.sub(r"a valid dictionary or instance of \w+", "a mapping of settings", message)
    if not path or isinstance(first["input"], dict):
        return (f"{dotted}: " if dotted else "") + message + more
    return f"{dotted}={first['input']!r} {message}{_description(path, model)}{more}"


def _nearest(path: Sequence[str], model: type[BaseModel]) -> str:
    here = _fields(model, path[:-1])
    if close := difflib.get_close_matches(path[-1], here, n=1, cutoff=0.6):
        return f"; did you mean {'.'.join([*path[:-1], close[0]])}?"
    everywhere = _all_fields(model)
    by_name = [dotted for dotted in everywhere if dotted.rpartition(".")[2] == path[-1]]
    if found := by_name or difflib.get_close_matches(".".join(path), everywhere, n=1, cutoff=0.6):
        return f"; did you mean {found[0]}?"
    return f"; known here: {', '.join(here)}"


def _submodel(annotation: object) -> type[BaseModel] | None:
    """The model of a section; of a union the first."""
    return next(iter(_submodels(annotation)), None)


def _submodels(annotation: object) -> list[type[BaseModel]]:
    """The models that a section may be."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in _submodels(part)]


def _models_at(model: type[BaseModel], path: Sequence[str]) -> list[type[BaseModel]]:
    models, keys = [model], iter(path)
    for key in keys:
        annotations = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        models = [inner for annotation in annotations for inner in _submodels(annotation)]
        if any(typing.get_origin(annotation) is dict for annotation in annotations):
            next(keys, None)  # a name of the user's, as of a subset
    return models


def _fields(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for found in _models_at(model, path) for name in found.model_fields))


def _all_fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        for inner in _submodels(field.annotation):
            names += _all_fields(inner, f"{prefix}{name}.")
    return names


def _description(path: Sequence[str], model: type[BaseModel]) -> str:
    holders = _models_at(model, path[:-1]) if path else []
    field = next((holder.model_fields[path[-1]] for holder in holders if path[-1] in holder.model_fields), None)
    return f" [{field.description}]" if field is not None and field.description else ""
