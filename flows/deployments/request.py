"""A request to a deployment, by a person or a schedule: the name of a recipe and the settings that differ from it.

The root is not part of a request. It belongs to the service, and the worker gets it from its environment.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, absolute, location
from flows.deployments.allowed import check_request_paths
from flows.deployments.form import form_schema
from flows.pipeline.recipe import Recipe, dotted_changes, known_recipes, load_recipe
from flows.prefect_server.processes import ROOT_VARIABLE


@dataclass(frozen=True, slots=True)
class _Schema:
    """A JSON schema for a parameter, used by the form and by the checks of Prefect's server. The value stays plain."""

    make: Callable[[], dict[str, Any]]

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.make()


_GRID_SCHEMA = {"type": "object", "additionalProperties": {"type": "array", "minItems": 1}}  # drawn as a JSON editor

RecipeName = Annotated[str, _Schema(lambda: {"type": "string", "enum": known_recipes()})]
Overrides = Annotated[dict[str, Any], _Schema(form_schema)]
Grid = Annotated[dict[str, list[Any]], _Schema(lambda: dict(_GRID_SCHEMA))]


def service_root() -> StorePath:
    """Return the root of this worker's service.

    Raises:
        InputError: ATHANOR_ROOT is not set.
    """
    text = os.environ.get(ROOT_VARIABLE)
    if not text:
        raise InputError(
            f"{ROOT_VARIABLE} is not set, so this worker serves no root; start workers by `athanor up`, or set it"
        )
    return absolute(location(text))


def resolve_request(
    recipe: str, overrides: Mapping[str, Any], root: StorePath, changes: Mapping[str, object] | None = None
) -> Recipe:
    """Return the checked configuration that a request asks for.

    Args:
        recipe: a known name. A path is refused, because a request may come from anybody who sees the form.
        overrides: nested as PipelineConfig; None keeps the recipe's value, "none" means null.
        changes: dotted fields of a grid, applied after the overrides.

    Raises:
        InputError: something is wrong with the request; the message names the field.
    """
    if recipe not in known_recipes():
        raise InputError(f"recipe={recipe!r} is not known; one of {', '.join(known_recipes())}")
    resolved = load_recipe(recipe, changes={**dotted_changes(overrides), **(changes or {})})
    check_request_paths(resolved.config, root, load_recipe(recipe).config)
    return resolved
