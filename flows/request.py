"""A request: what a person or a schedule asks of a deployment, a recipe by name with only the overrides filled in.

The root is no part of a request: it belongs to the service, whose worker has it in its environment.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, absolute, location
from flows.recipe import Recipe, dotted_changes, known_recipes, load_recipe
from flows.request_form import NONE, form_schema, recipe_schema
from flows.request_paths import check_request_paths

ROOT_VARIABLE = "ATHANOR_ROOT"


class _RecipeSchema:
    """The form shows a choice of the known recipes."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return recipe_schema()


class _OverridesSchema:
    """The form shows PipelineConfig, and Prefect's server checks by it; the values stay plain."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return form_schema()


class _GridSchema:
    """The form shows an editor for JSON."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "array", "minItems": 1}}


RecipeName = Annotated[str, _RecipeSchema]
Overrides = Annotated[dict[str, Any], _OverridesSchema]
Grid = Annotated[dict[str, list[Any]], _GridSchema]


def service_root() -> StorePath:
    """The root that this worker serves.

    Raises:
        InputError: the variable is not set.
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
    """The checked configuration that a request asks for.

    Args:
        recipe: a known name; a path is refused, for a request may come from anybody who sees the form.
        overrides: nested as PipelineConfig; None: as the recipe says, "none": null.
        changes: dotted fields of a grid, put in after the overrides.

    Raises:
        InputError: what is wrong, in one line with the field's path.
    """
    if recipe not in known_recipes():
        raise InputError(f"recipe={recipe!r} is not known; one of {', '.join(known_recipes())}")
    resolved = load_recipe(recipe, changes={**dotted_changes(overrides, NONE), **(changes or {})})
    check_request_paths(resolved.config, root, load_recipe(recipe).config)
    return resolved
