"""One-line explanations of a wrong recipe: the field, its value, its bounds or the nearest known field."""

import difflib
import typing
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from dataset_builders.errors import plain_message, shown, without_middle
from flows.pipeline.config import EASY_VQA, EMBEDDED, SOURCE, SOURCES


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first error of a validation in one line: the dotted field, the value, the bound or the nearest key."""
    details = error.errors(include_url=False)
    # An unknown key is the likely cause of a missing one, so it comes first.
    first = min(details, key=lambda d: d["type"] != "extra_forbidden")
    # The location holds the tag of a union's member, either second, as in ("data", "embedded", "seed"), or in brackets.
    tags = (EMBEDDED, EASY_VQA, SOURCE, SOURCES)
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
